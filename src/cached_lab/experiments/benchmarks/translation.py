"""Our encoder-decoder, plain and with GRC, beside transformers' BART and Marian of its size: training and beam search.

All models have six layers of encoder and of decoder, width 512, 4 heads, 1024 hidden units, and one table of embeddings
for source, target and output (the sizes that arXiv:2312.12742 trains on IWSLT). Batches are padded; decoding is beam
search with kept keys and values, on random weights, from which the token that ends a text is shut out, so that all
write as many tokens.

Ratios are times over that of our plain model: above 1, ours is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.reports.markdown import table
from cached_lab.tasks.translation.translate import translate
from cached_transformers.extras import require
from cached_transformers.models.encoder_decoder import EncoderDecoder

from .interleaved import Ratio, compare, precision, training_step

PAD, END, BEGIN, FIRST = 0, 1, 2, 3
"""Tokens with a meaning, and the first without."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rows: sentences in a batch of training, whose length lies between a half of `tokens` and all.
        sentences, beams, written: sentences and beams of beam search, and tokens that each writes.
        alone, long: sentences and tokens of the comparison of decoding with and without kept keys and values.
    """

    width: int = 512
    depth: int = 6
    heads: int = 4
    feed_forward: int = 1024
    vocabulary: int = 10_000
    dropout: float = 0.3
    rows: int = 32
    tokens: int = 32
    sentences: int = 16
    beams: int = 5
    written: int = 32
    alone: int = 2
    long: int = 64


@dataclass(frozen=True)
class Row:
    """Measurements of one model; target tokens a second of processor time, by the median."""

    case: str
    parameters: int
    train: Ratio
    train_tokens: float
    decode: Ratio
    decode_tokens: float


@dataclass(frozen=True)
class Kept:
    """Beam search with and without kept keys and values; the ratio is to that with them."""

    case: str
    tokens: int
    decode: Ratio
    decode_tokens: float


@dataclass(frozen=True)
class Case:
    """A model, its loss on a batch, and its beam search: (sources, padding, beams, tokens) -> tokens written."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    write: Callable[..., int]


@dataclass(frozen=True)
class Batch:
    """Sources with padding; targets, -100 behind their end; what the decoder reads."""

    inputs: Tensor
    padding: Tensor
    decoder_inputs: Tensor
    targets: Tensor


def make_batch(sizes: Sizes, rows: int, device: str) -> Batch:
    """Random sentences of lengths between a half of `sizes.tokens` and all, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    n = sizes.tokens
    inputs, targets = torch.randint(FIRST, sizes.vocabulary, (2, rows, n), generator=generator)
    lengths = torch.randint(n // 2, n + 1, (2, rows, 1), generator=generator)
    lengths[:, 0] = n
    padding, behind = torch.arange(n) >= lengths
    decoder_inputs = torch.cat([torch.full((rows, 1), BEGIN), targets[:, :-1]], 1)
    parts = (inputs.masked_fill(padding, PAD), padding, decoder_inputs, targets.masked_fill(behind, -100))
    return Batch(*(t.to(device) for t in parts))


def ours(sizes: Sizes, memory: Any) -> Case:
    """Our model."""
    model = EncoderDecoder(
        sizes.vocabulary,
        width=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        feed_forward=sizes.feed_forward,
        dropout=sizes.dropout,
        memory=memory,
        output_bias=True,
    )
    with torch.no_grad():
        model.head.bias[END] = -1e4

    def loss(batch: Batch) -> Tensor:
        out = model(batch.inputs, batch.decoder_inputs, batch.padding, targets=batch.targets)
        return out.outputs.sum() / (batch.targets >= 0).sum() + out.auxiliary_loss

    def write(inputs: Tensor, padding: Tensor, beams: int, tokens: int, cached: bool = True) -> int:
        options: dict[str, Any] = {"begin": BEGIN, "end": END, "beams": beams, "tokens": tokens, "cached": cached}
        return int(translate(model, inputs, padding=padding, **options).length_B.sum())

    return Case(model, loss, write)


def theirs(kind: str, sizes: Sizes) -> Case:
    """BART or Marian of transformers, with its fused attention."""
    transformers = require("transformers", extra="language")
    config, model_class = {
        "BART": (transformers.BartConfig, transformers.BartForConditionalGeneration),
        "Marian": (transformers.MarianConfig, transformers.MarianMTModel),
    }[kind]
    of_a_side = {"layers": sizes.depth, "attention_heads": sizes.heads, "ffn_dim": sizes.feed_forward}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in of_a_side.items()}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": BEGIN, "decoder_start_token_id": BEGIN}
    shape = {"vocab_size": sizes.vocabulary, "d_model": sizes.width, "dropout": sizes.dropout, **sides}
    options = {"max_position_embeddings": 512, "activation_function": "relu", "scale_embedding": True}
    model = model_class(config(**shape, **options, **tokens, forced_eos_token_id=None))
    model.final_logits_bias[0, END] = -1e4

    def loss(batch: Batch) -> Tensor:
        attended = {"attention_mask": (~batch.padding).long()}
        out = model(batch.inputs, decoder_input_ids=batch.decoder_inputs, labels=batch.targets, **attended)
        return out.loss  # type: ignore[no-any-return]

    def write(inputs: Tensor, padding: Tensor, beams: int, tokens: int) -> int:
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": tokens, "early_stopping": True}
        with torch.no_grad():
            found = model.generate(inputs, attention_mask=(~padding).long(), do_sample=False, **options)
        return int((found[:, 1:] != PAD).sum())

    return Case(model, loss, write)


def _train_step(case: Case, batch: Batch, dtype: torch.dtype) -> Callable[[], None]:
    def loss() -> Tensor:
        with precision(batch.inputs.device.type, dtype):
            return case.loss(batch)

    return training_step(case.model, loss)


def _writer(
    case: Case, inputs: Tensor, padding: Tensor, beams: int, tokens: int, dtype: torch.dtype, **options: Any
) -> Callable[[], None]:
    def write() -> None:
        with precision(inputs.device.type, dtype):
            found = case.write(inputs, padding, beams, tokens, **options)
        if found != tokens * len(inputs):
            raise ValueError(f"{found} tokens were written, not {tokens} for each of {len(inputs)} sentences")

    return write


def run(
    rounds: int, device: str, sizes: Sizes | None = None, *, peers: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[list[Row], list[Kept]]:
    """Measure training and beam search of all models, and ours with and without kept keys and values.

    Args:
        rounds: counted rounds of training steps; beam search takes a third, that without kept keys a quarter.
        peers: whether transformers' models are measured, too.
        dtype: of autocast; float32 for none.
    """
    sizes = sizes if sizes is not None else Sizes()
    torch.manual_seed(0)
    cases = {"plain": ours(sizes, None), "GRC": ours(sizes, "grc")}
    if peers:
        cases |= {f"{kind} of transformers": theirs(kind, sizes) for kind in ("BART", "Marian")}
    for case in cases.values():
        case.model.to(device)
    batch = make_batch(sizes, sizes.rows, device)
    train = compare({name: _train_step(case, batch, dtype) for name, case in cases.items()}, "plain", rounds)
    for case in cases.values():
        case.model.eval()
    few = make_batch(sizes, sizes.sentences, device)
    searched = (few.inputs, few.padding, sizes.beams, sizes.written, dtype)
    decode = compare({name: _writer(case, *searched) for name, case in cases.items()}, "plain", max(1, rounds // 3))
    rows = [
        Row(
            name,
            count_parameters(case.model),
            train[name],
            float((batch.targets >= 0).sum()) / train[name].seconds,
            decode[name],
            sizes.sentences * sizes.written / decode[name].seconds,
        )
        for name, case in cases.items()
    ]
    alone = (few.inputs[: sizes.alone], few.padding[: sizes.alone], sizes.beams, sizes.long, dtype)
    writers = {name: _writer(cases["plain"], *alone, cached=cached) for name, cached in KEPT.items()}
    times = compare(writers, "kept", max(1, rounds // 4))
    kept = [Kept(name, sizes.long, t, sizes.alone * sizes.long / t.seconds) for name, t in times.items()]
    return rows, kept


KEPT = {"kept": True, "read again": False}


def as_markdown(rows: Sequence[Row], kept: Sequence[Kept]) -> str:
    """Both tables in Markdown."""
    head = "model | parameters (M) | train step | fastest | train tokens/s | beam search | fastest | tokens/s"
    cells = []
    for r in rows:
        train, decode = (
            (str(t), f"{t.fastest:.3f}x") if r.case != "plain" else ("1", "1") for t in (r.train, r.decode)
        )
        speeds = f"{r.train_tokens:.0f}", f"{r.decode_tokens:.0f}"
        cells.append([r.case, f"{r.parameters / 1e6:.2f}", *train, speeds[0], *decode, speeds[1]])
    searched = [
        [k.case, str(k.tokens), "1" if k.case == "kept" else str(k.decode), f"{k.decode_tokens:.0f}"] for k in kept
    ]
    below = table(["keys and values", "tokens", "beam search", "tokens/s"], searched)
    return f"{table(head.split(' | '), cells)}\n\n{below}"
