"""A large store of Memorizing Transformers: what reading, writing and keeping it costs, and a long text read with it.

One layer of 8 heads and width 512 reads segments of 512 tokens in evaluation, one row, with a store that is full. The
time of a read stands beside that of its products alone: made at once with their result kept, and in chunks that are
thrown away; and beside the plain form (all products, then the largest), where that fits.

Legend: N tokens, M slots, H heads, E head width.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.experiments.reports.markdown import table
from cached_transformers import state as states
from cached_transformers.integrations.models import create_model
from cached_transformers.interfaces.memory import Query
from cached_transformers.loops.streaming import read_stream
from cached_transformers.memories.memorizing import Memorizing, NeighbourStore, attend, store, unit
from cached_transformers.models.segments import read_segments

from .interleaved import Ratio, compare

KEYS = (8_192, 65_536, 262_144)
TOKENS = 5_000_000
"""Of the text that is read."""
WIDTH, HEADS, SEGMENT = 512, 8, 512
FITS = 6 * 2**30
"""Bytes of products up to which they are made at once."""
CHUNK = 4096
"""Slots of whose products a chunk consists."""


@dataclass(frozen=True)
class Row:
    """One size of the store.

    Attributes:
        resident: the most that was in memory while segments were read in place, beyond what was before there was a
            store, over the store's size; None where the system does not tell.
        read: of one segment, seconds and its ratio to `products`. products: in chunks that are not kept. kept: at
            once, with the result; plain: all products, then the largest; None where they do not fit.
        written, copied: of a segment, in place, and into a copy that is sealed.
    """

    keys: int
    mebibytes: float
    resident: float | None
    read: Ratio
    products: float
    kept: float | None
    plain: float | None
    written: float
    copied: float


@dataclass(frozen=True)
class Tenth:
    """A tenth of a text: tokens read by its end, MiB in memory then, and tokens a second in it."""

    tokens: int
    mebibytes: float
    speed: float


def in_memory(device: str, peak: bool = False) -> int | None:
    """Bytes now, or at most since `forget_peak`: of tensors on a GPU, of this process in memory elsewhere, where the
    system tells it."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
    return None if found is None else int(found[1]) * 1024


def forget_peak(device: str) -> None:
    """Count the most memory from now on."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def build(keys: int, device: str, width: int = WIDTH, heads: int = HEADS) -> nn.Module:
    """A model of bytes, of one layer, which has the store."""
    torch.manual_seed(0)
    memory = {"name": "memorizing", "length": keys}
    sizes: dict[str, Any] = {"width": width, "depth": 1, "heads": heads, "feed_forward": 4 * width}
    return create_model("language_model", vocabulary=256, memory=memory, **sizes).to(device).eval()


def filled(model: nn.Module) -> Any:
    """A state whose store is full of random directions, a head at a time, so that nothing else takes memory."""
    state = model.init_state(1)  # type: ignore[operator]
    found: NeighbourStore = state.layers[0]
    for head in range(found.k_BHME.shape[1]):
        found.k_BHME[:, head] = unit(found.k_BHME[:, head].normal_())
    found.written_B.fill_(found.k_BHME.shape[2])
    return state


def resident(model: nn.Module, device: str, segments: int = 3) -> tuple[float | None, Any]:
    """The most memory over that of the store while segments are read in place; and the state."""

    def read(tokens: Tensor, before: Any, reset: Tensor | None) -> Any:
        return model(tokens, before)

    text = torch.randint(256, (1, SEGMENT * (segments + 1)), device=device)
    small = build(64, device)
    small(text[:, :SEGMENT], filled(small))  # what every process needs once
    gc.collect()
    before = in_memory(device)
    state = filled(model)
    forget_peak(device)
    for out in read_segments(read, text[:, SEGMENT:].split(SEGMENT, 1), state, in_place=True):
        state = out.state
    most = in_memory(device, peak=True)
    size = states.nbytes(state.layers[0])
    return (None if most is None or before is None else (most - before) / size), state


def products(q_HNE: Tensor, k_HME: Tensor) -> None:
    """All products, in chunks that are not kept."""
    scratch_CN = k_HME.new_empty(CHUNK, q_HNE.shape[1])
    for q_NE, k_ME in zip(q_HNE, k_HME, strict=True):
        for k_CE in k_ME.split(CHUNK):
            torch.mm(k_CE, q_NE.mT, out=scratch_CN[: len(k_CE)])


def plain(q_BHNE: Tensor, found: NeighbourStore, memory: Memorizing) -> None:
    """All products at once, a copy without those of empty slots, and the largest."""
    slots = found.k_BHME.shape[2]
    empty_B11M = torch.arange(slots, device=q_BHNE.device) >= found.filled_B[:, None, None, None]
    index_BHNK = (q_BHNE @ found.k_BHME.mT).masked_fill(empty_B11M, -torch.inf).topk(memory.k, -1).indices
    attend(q_BHNE, found, index_BHNK, memory.scale_H.abs())


@torch.no_grad()
def measure(keys: int, rounds: int, device: str = "cpu") -> Row:
    """All of one size."""
    model = build(keys, device)
    held, state = resident(model, device)
    found: NeighbourStore = state.layers[0]
    memory: Memorizing = model.stack.blocks[0].attention.memory  # type: ignore[union-attr, assignment, index]
    q, k, v = (torch.randn(1, HEADS, SEGMENT, WIDTH // HEADS, device=device) for _ in range(3))
    query = Query(q[:, 0], q)

    def write(in_place: bool) -> None:
        with states.last_use(found if in_place else None):
            states.seal(store(found, unit(k), v))

    cases: dict[str, Callable[[], object]] = {
        "products": lambda: products(q[0], found.k_BHME[0]),
        "read": lambda: memory.read(found, query, None),
        "written": lambda: write(True),
        "copied": lambda: write(False),
    }
    bytes_of_products = HEADS * SEGMENT * keys * 4
    if bytes_of_products < FITS:
        cases["kept"] = lambda: q @ found.k_BHME.mT
    if 2 * bytes_of_products < FITS:
        cases["plain"] = lambda: plain(unit(q), found, memory)
    times = compare(cases, "products", rounds)
    seconds = {name: ratio.seconds for name, ratio in times.items()}
    size = states.nbytes(found) / 2**20
    chosen = (seconds["products"], seconds.get("kept"), seconds.get("plain"), seconds["written"], seconds["copied"])
    return Row(keys, size, held, times["read"], *chosen)


def read_text(keys: int, tokens: int, device: str, width: int = 64, heads: int = 2) -> list[Tenth]:
    """A text of random bytes, read segment after segment with a narrow model, whose store turns over and over."""
    model, tenths = build(keys, device, width, heads), list[Tenth]()
    every = max(tokens // 10, 1)
    clock, done = time.perf_counter(), 0
    for now in read_stream(model, _bytes(tokens + 1), SEGMENT, in_place=True):
        if now.tokens >= every * (len(tenths) + 1):
            passed, clock = time.perf_counter() - clock, time.perf_counter()
            tenths.append(Tenth(now.tokens, (in_memory(device) or 0) / 2**20, (now.tokens - done) / passed))
            done = now.tokens
    return tenths


def _bytes(tokens: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, tokens, 10_000):
        yield torch.randint(256, (min(10_000, tokens - begin),), generator=generator).tolist()


def run(
    rounds: int, keys: tuple[int, ...] = KEYS, tokens: int = TOKENS, device: str = "cpu"
) -> tuple[list[Row], list[Tenth]]:
    """Measure stores of so many keys, and read a text with the smallest."""
    if min(keys) < 1 or tokens < 10 * SEGMENT:
        raise ValueError(f"keys {keys} must be at least 1, and the text of {tokens} tokens 10 segments of {SEGMENT}")
    return [measure(size, rounds, device) for size in keys], read_text(min(keys), tokens, device)


def as_markdown(rows: list[Row], tenths: list[Tenth]) -> str:
    """Two tables: the stores, and the text."""

    def shown(seconds: float | None) -> str:
        return "does not fit" if seconds is None else f"{1000 * seconds:,.1f}"

    head = (
        "keys | store (MiB) | in memory, store = 1 | read (ms) | products alone = 1 | products, kept (ms) | "
        "plain form (ms) | write in place (ms) | write a copy (ms)"
    )
    lines = [
        [
            f"{r.keys:,}",
            f"{r.mebibytes:,.0f}",
            "" if r.resident is None else f"{r.resident:.2f}",
            shown(r.read.seconds),
            str(r.read),
            shown(r.kept),
            shown(r.plain),
            shown(r.written),
            shown(r.copied),
        ]
        for r in rows
    ]
    text = [
        ["MiB", *(f"{t.mebibytes:,.0f}" for t in tenths)],
        ["tokens/s", *(f"{t.speed:,.0f}" for t in tenths)],
    ]
    read = statistics.median(t.speed for t in tenths)
    title = f"{tenths[-1].tokens:,} tokens with {min(r.keys for r in rows):,} keys, {read:,.0f} a second, at each tenth"
    below = table([title, *(f"{n}/10" for n in range(1, len(tenths) + 1))], text)
    return table(head.split(" | "), lines) + "\n\n" + below
