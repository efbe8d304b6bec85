"""Speed of writing: our language models, with and without a memory, beside others' with keys and values that they keep.

All write the same number of tokens greedily after the same prompt, at the same layers, width, heads and feed-forward,
with random weights. Ours read by segments, as a memory wants it, and forget what no memory carries; the others attend
the whole text. Ours are also timed as they would be if every token read its segment again.

Legend: B rows, N tokens of a prompt, T new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.experiments.reports.markdown import table
from cached_transformers.models.generation import generate
from cached_transformers.registry import unknown_name

from . import memories, profiled
from .generation_peers import GPT2, PEERS
from .interleaved import Ratio, compare
from .peers import Sizes, lacking

NO_MEMORY = "no memory"
STANDARD = ("transformer_xl", "grc_stream", "rmt")
"""Memories that are measured unless others are named."""
TOKENS = 384
"""More than a short segment has, and most of a long one."""


@dataclass(frozen=True)
class Text:
    """What is written: new tokens for each of so many rows after a prompt, read by segments of so many tokens."""

    rows: int
    segment: int
    prompt: int = 16
    tokens: int = TOKENS

    def given(self, vocabulary: int, device: str) -> Tensor:
        """A prompt (B, N), the same for all models."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (self.rows, self.prompt), generator=generator).to(device)

    def __str__(self) -> str:
        return f"{self.tokens} tokens for {self.rows} rows by segments of {self.segment}"


@dataclass(frozen=True)
class Row:
    """One model in one setting.

    Attributes:
        model: a peer, a memory of ours, or ours without one.
        speed: new tokens a second, of all rows together.
        time: over that of the reference.
        again: the time when every token reads its segment again, over that of `generate`; none for peers.
    """

    rows: int
    segment: int
    model: str
    parameters: int
    speed: float
    time: Ratio
    reference: str
    again: Ratio | None


Writer = Callable[[], Tensor]


def our_writer(model: nn.Module, prompt_BN: Tensor, text: Text) -> Writer:
    """A function that writes the text by `generate`."""
    return lambda: generate(model, prompt_BN, tokens=text.tokens, segment_length=text.segment, temperature=0).tokens


@torch.no_grad()
def read_again(model: nn.Module, prompt_BN: Tensor, text: Text) -> Tensor:
    """What `generate` writes, (B, T), with a pass over the whole open segment for each token."""
    state, open_BN = model.init_state(len(prompt_BN)), prompt_BN  # type: ignore[operator]
    new = []
    for _ in range(text.tokens):
        while open_BN.shape[1] > text.segment:
            state, open_BN = model(open_BN[:, : text.segment], state).state, open_BN[:, text.segment :]
        new.append(model(open_BN, state, last_only=True).outputs[:, -1:].argmax(-1))
        open_BN = torch.cat([open_BN, new[-1]], 1)
    return torch.cat(new, 1)


def _checked(write: Writer, text: Text) -> Callable[[], None]:
    """The writer, which must write as much as all others do."""

    def run() -> None:
        shape = tuple(write().shape)
        if shape != (text.rows, text.tokens):
            raise ValueError(f"tokens of shape {shape} were written, not {(text.rows, text.tokens)}")

    return run


def build(name: str, sizes: Sizes, text: Text) -> nn.Module:
    """One of ours; a memory that has a length has that of a segment."""
    own = dataclasses.replace(sizes, segment=text.segment, memory=text.segment)
    return memories.build(None if name == NO_MEMORY else memories.spec(name, own), own).eval()


def measure(
    text: Text, names: Sequence[str], sizes: Sizes, rounds: int, device: str, dtype: torch.dtype
) -> tuple[list[Row], list[str]]:
    """All rows of one setting, and which peers it lacks."""
    prompt_BN = text.given(sizes.vocabulary, device)
    models: dict[str, nn.Module] = {}
    writers: dict[str, Writer] = {}
    missing = []
    for name, peer in PEERS.items():
        torch.manual_seed(0)
        try:
            model, write = peer.build(sizes, text.prompt + text.tokens)
        except ImportError as error:
            missing.append(lacking(peer.distribution, error))
            continue
        models[name] = model.to(device, dtype).eval()
        writers[name] = functools.partial(write, prompt_BN, text.tokens)
    own = [NO_MEMORY, *names]
    for name in own:
        models[name] = build(name, sizes, text).to(device, dtype)
        writers[name] = our_writer(models[name], prompt_BN, text)
    reference = GPT2 if GPT2 in models else NO_MEMORY
    times = compare({name: _checked(write, text) for name, write in writers.items()}, reference, rounds)
    again = {name: _again(models[name], writers[name], prompt_BN, text, max(1, rounds // 4)) for name in own}
    written = text.rows * text.tokens
    rows = [
        Row(
            text.rows,
            text.segment,
            name,
            count_parameters(model),
            written / times[name].seconds,
            times[name],
            reference,
            again.get(name),
        )
        for name, model in models.items()
    ]
    return rows, missing


def _again(model: nn.Module, write: Writer, prompt_BN: Tensor, text: Text, rounds: int) -> Ratio:
    cases = {"kept": _checked(write, text), "again": lambda: read_again(model, prompt_BN, text)}
    return compare(cases, "kept", rounds)["again"]


def run(
    rounds: int,
    device: str,
    *,
    only: str | None = None,
    sizes: Sizes | None = None,
    batches: Sequence[int] = (1, 8),
    segments: Sequence[int] = (128, 512),
    prompt: int = 16,
    tokens: int = TOKENS,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Row], list[str]]:
    """Measure all settings; the rows, and what is not installed.

    Args:
        rounds: counted rounds; reading again takes a quarter.
        only: names of memories with commas between them; None for `STANDARD`, "all" for all that a causal model takes.
        batches: numbers of rows that are written at once. segments: lengths. prompt, tokens: given, and new ones.
        dtype: of the weights.

    Raises:
        ValueError: an unknown memory, or numbers below 1.
    """
    names = chosen(only)
    numbers = {"rows": batches, "segments": segments, "prompt": [prompt], "tokens": [tokens]}
    for name, given in numbers.items():
        if not given or min(given) < 1:
            raise ValueError(f"{name} {list(given)} must be numbers from 1 on")
    rows: list[Row] = []
    missing: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        for batch in batches:
            for segment in segments:
                text = Text(batch, segment, prompt, tokens)
                found, lacks = measure(text, names, sizes or Sizes(), rounds, device, dtype)
                rows += found
                missing |= dict.fromkeys(lacks)
    return rows, list(missing)


def chosen(only: str | None) -> list[str]:
    """The memories that are named; those that are measured by themselves where none is."""
    known = stream_memories()
    names = list(STANDARD) if only is None else known if only == "all" else only.split(",")
    for name in names:
        if name not in known:
            raise ValueError(unknown_name("memory of a causal language model", name, known))
    return names


def profile(name: str, device: str, sizes: Sizes, text: Text, dtype: torch.dtype) -> str:
    """The operators that take most of the time of one of ours, as Markdown.

    Raises:
        ValueError: no memory of this name, nor "none".
    """
    if name != "none":
        chosen(name)
    model = build(NO_MEMORY if name == "none" else name, sizes, text).to(device, dtype)
    write = our_writer(model, text.given(sizes.vocabulary, device), text)
    return f"{name}, {text}:\n\n{profiled.operators(write, device)}"


def as_markdown(rows: Sequence[Row], missing: Sequence[str] = ()) -> str:
    """The rows as a Markdown table, and a line for what could not be measured."""
    reference = rows[0].reference if rows else GPT2
    head = [
        *("rows", "segment", "model", "parameters (M)", "tokens/s", f"time, {reference} = 1", "fastest"),
        "reading again, kept = 1",
    ]
    cells = [
        [
            str(r.rows),
            str(r.segment),
            r.model,
            f"{r.parameters / 1e6:.2f}",
            f"{r.speed:,.0f}",
            *(("1", "1") if r.model == r.reference else (str(r.time), f"{r.time.fastest:.3f}x")),
            "" if r.again is None else str(r.again),
        ]
        for r in rows
    ]
    return "\n\n".join([table(head, cells), *(f"Left out: {reason}." for reason in missing)])
