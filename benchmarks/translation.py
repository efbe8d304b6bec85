"""Our encoder-decoder, plain and with GRC, against transformers' BART and Marian of its size: training and beam search.

All models have six layers of encoder and of decoder, width 512, 4 heads, 1024 hidden units and one embedding table for
source, target and output (the sizes that arXiv:2312.12742 trains on IWSLT). Batches are padded. Beam search uses a KV
cache and random weights that never write the end token, so that all write the same number of tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.costs.timing import compare, precision, training_step
from cached_lab.tasks.translation.translate import translate
from cached_transformers.extras import require
from cached_transformers.models.encoder_decoder import EncoderDecoder

PAD, END, BEGIN, FIRST = 0, 1, 2, 3
"""Special tokens, and the first ordinary one."""


@dataclass(frozen=True)
class TranslationSizes:
    """Sizes of models and work.

    Attributes:
        rows: sentences in a training batch, of `tokens` / 2 to `tokens` tokens.
        sentences, beams, written: sentences and beams of beam search, and tokens written for each.
        few, long: sentences and tokens of the comparison with and without a KV cache.
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
    few: int = 2
    long: int = 64


class TranslationBatch(NamedTuple):
    """Sources with padding, decoder inputs, and targets with -100 after their end."""

    inputs: Tensor
    padding: Tensor
    decoder_inputs: Tensor
    targets: Tensor


class Translator(NamedTuple):
    """A model, its mean loss on a batch, and its beam search: (sources, padding, beams, tokens) -> tokens written."""

    model: nn.Module
    loss: Callable[[TranslationBatch], Tensor]
    write: Callable[..., int]


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_dtype(parser, "of autocast")


def make_batch(sizes: TranslationSizes, rows: int, device: str) -> TranslationBatch:
    """Return random sentences, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    n = sizes.tokens
    inputs, targets = torch.randint(FIRST, sizes.vocabulary, (2, rows, n), generator=generator)
    lengths = torch.randint(n // 2, n + 1, (2, rows, 1), generator=generator)
    lengths[:, 0] = n
    padding, after = torch.arange(n) >= lengths
    decoder_inputs = torch.cat([torch.full((rows, 1), BEGIN), targets[:, :-1]], 1)
    parts = (inputs.masked_fill(padding, PAD), padding, decoder_inputs, targets.masked_fill(after, -100))
    return TranslationBatch(*(t.to(device) for t in parts))


def ours(sizes: TranslationSizes, memory: Any) -> Translator:
    """Build our model."""
    shape: dict[str, Any] = {"width": sizes.width, "depth": sizes.depth, "heads": sizes.heads}
    shape |= {"feed_forward": sizes.feed_forward, "dropout": sizes.dropout}
    model = EncoderDecoder(sizes.vocabulary, **shape, memory=memory, output_bias=True)
    with torch.no_grad():
        model.head.bias[END] = -1e4

    def loss(batch: TranslationBatch) -> Tensor:
        out = model(batch.inputs, batch.decoder_inputs, batch.padding, targets=batch.targets)
        return out.outputs.sum() / (batch.targets >= 0).sum() + out.auxiliary_loss

    def write(inputs: Tensor, padding: Tensor, beams: int, tokens: int, cached: bool = True) -> int:
        options: dict[str, Any] = {"begin": BEGIN, "end": END, "beams": beams, "tokens": tokens, "cached": cached}
        return int(translate(model, inputs, padding=padding, **options).length_B.sum())

    return Translator(model, loss, write)


def theirs(kind: str, sizes: TranslationSizes) -> Translator:
    """Build BART or Marian of transformers, with fused attention."""
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

    def loss(batch: TranslationBatch) -> Tensor:
        attended = {"attention_mask": (~batch.padding).long()}
        out = model(batch.inputs, decoder_input_ids=batch.decoder_inputs, labels=batch.targets, **attended)
        return out.loss  # type: ignore[no-any-return]

    def write(inputs: Tensor, padding: Tensor, beams: int, tokens: int) -> int:
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": tokens, "early_stopping": True}
        with torch.no_grad():
            found = model.generate(inputs, attention_mask=(~padding).long(), do_sample=False, **options)
        return int((found[:, 1:] != PAD).sum())

    return Translator(model, loss, write)


def measure(options: argparse.Namespace, sizes: TranslationSizes | None = None) -> command.Result:
    """Measure training and beam search of all models, and ours with and without a KV cache.

    Beam search takes a third of the rounds of training, without a KV cache a quarter.
    """
    sizes, rounds, device = sizes or TranslationSizes(), options.rounds, options.device
    autocast = partial(precision, device, command.dtype_of(options))
    torch.manual_seed(0)
    models = {"plain": ours(sizes, None), "GRC": ours(sizes, "grc")}
    models |= {f"{kind} of transformers": theirs(kind, sizes) for kind in ("BART", "Marian")}
    batch, few = (make_batch(sizes, count, device) for count in (sizes.rows, sizes.sentences))

    def loss(of: Translator) -> Tensor:
        with autocast():
            return of.loss(batch)

    def write(of: Translator, sentences: int, tokens: int, **more: Any) -> None:
        with autocast():
            found = of.write(few.inputs[:sentences], few.padding[:sentences], sizes.beams, tokens, **more)
        if found != tokens * sentences:
            raise ValueError(f"{found} tokens were written, not {tokens} for each of {sentences} sentences")

    steps = {name: training_step(of.model.to(device), partial(loss, of)) for name, of in models.items()}
    train = compare(steps, "plain", rounds)
    for of in models.values():
        of.model.eval()
    searches = {name: partial(write, of, sizes.sentences, sizes.written) for name, of in models.items()}
    decode = compare(searches, "plain", max(1, rounds // 3))
    rows: list[command.Measurement] = [
        {
            "case": name,
            "parameters": count_parameters(of.model),
            "train": train[name],
            "train_tokens": float((batch.targets >= 0).sum()) / train[name].seconds,
            "decode": decode[name],
            "decode_tokens": sizes.sentences * sizes.written / decode[name].seconds,
        }
        for name, of in models.items()
    ]
    ways = {"cached": True, "computed again": False}
    cases = {name: partial(write, models["plain"], sizes.few, sizes.long, cached=flag) for name, flag in ways.items()}
    times = compare(cases, "cached", max(1, rounds // 4))
    written = sizes.few * sizes.long
    caches = [{"case": name, "decode": t, "decode_tokens": written / t.seconds} for name, t in times.items()]
    text = as_markdown(rows, caches, sizes.long)
    return command.Result([*rows, *caches], text, {"dtype": options.dtype})


def as_markdown(rows: list[command.Measurement], caches: list[command.Measurement], long: int) -> str:
    """Write both tables."""
    head = ["model", "parameters (M)", "train step", "fastest", "train tokens/s", "beam search", "fastest", "tokens/s"]
    cells = []
    for row in rows:
        line = [row["case"], f"{row['parameters'] / 1e6:.2f}"]
        for work in ("train", "decode"):
            line += [*command.fastest(row[work], row["case"] == "plain"), f"{row[f'{work}_tokens']:.0f}"]
        cells.append(line)
    below = [
        [c["case"], str(long), command.fastest(c["decode"], c["case"] == "cached")[0], f"{c['decode_tokens']:.0f}"]
        for c in caches
    ]
    searched = command.table(["keys and values", "tokens", "beam search", "tokens/s"], below)
    return f"{command.table(head, cells)}\n\n{searched}"


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
