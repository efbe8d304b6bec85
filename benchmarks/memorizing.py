"""A large store of Memorizing Transformers: cost of reading, writing and memory, and a long text.

One layer of 8 heads and width 512 processes segments of 512 tokens in evaluation, one row, with a full store. The time
of a read is compared with its matrix products alone, in chunks that are discarded; with the same products kept at once;
and with the plain form (all products, then top-k), if they fit.

Legend: N tokens, M slots, H heads, E head width.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command
from cached_lab.experiments.costs.timing import compare
from cached_transformers import state as states
from cached_transformers.integrations.models import create_model
from cached_transformers.interfaces.memory import Query
from cached_transformers.loops.streaming import read_stream
from cached_transformers.memories.memorizing import Memorizing, NeighbourStore, attend, store, unit
from cached_transformers.models.segments import read_segments

WIDTH, HEADS, SEGMENT = 512, 8, 512
FITS = 6 * 2**30
"""Bytes of products up to which they are made at once."""
CHUNK = 4096
"""Slots per chunk of products."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=command.numbers, default=(8_192, 65_536, 262_144), help="keys in the store")
    parser.add_argument("--tokens", type=command.positive, default=5_000_000, help="of the text (default: 5,000,000)")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure stores of each size, and process a text with the smallest."""
    keys, tokens, device = options.lengths, options.tokens, options.device
    if tokens < 10 * SEGMENT:
        raise ValueError(f"--tokens {tokens} must be at least 10 segments of {SEGMENT}")
    stores = [measure_store(size, options.rounds, device) for size in keys]
    tenths = read_text(min(keys), tokens, device)
    return command.Result([*stores, *tenths], as_markdown(stores, tenths, min(keys)))


def in_memory(device: str, peak: bool = False) -> int | None:
    """Return bytes of tensors on a GPU, or of this process, now or at the peak; None if the system does not tell."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
    return None if found is None else int(found[1]) * 1024


def build(keys: int, device: str, width: int = WIDTH, heads: int = HEADS) -> nn.Module:
    """Build a model of bytes with one layer and the store."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": width, "depth": 1, "heads": heads, "feed_forward": 4 * width}
    memory = {"name": "memorizing", "length": keys}
    return create_model("language_model", vocabulary=256, memory=memory, **sizes).to(device).eval()


def filled(model: nn.Module) -> Any:
    """Return a state whose store is full of random directions, filled by head to save memory."""
    state = model.init_state(1)  # type: ignore[operator]
    found: NeighbourStore = state.layers[0]
    for head in range(found.k_BHME.shape[1]):
        found.k_BHME[:, head] = unit(found.k_BHME[:, head].normal_())
    found.written_B.fill_(found.k_BHME.shape[2])
    return state


def resident(model: nn.Module, device: str, segments: int = 3) -> tuple[float | None, Any]:
    """Process segments in place; return the peak memory beyond the start over the store's size, and the state."""
    text = torch.randint(256, (1, SEGMENT * (segments + 1)), device=device)
    small = build(64, device)
    small(text[:, :SEGMENT], filled(small))  # memory that every process needs once
    gc.collect()
    before = in_memory(device)
    state = filled(model)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    parts = text[:, SEGMENT:].split(SEGMENT, 1)
    for out in read_segments(lambda tokens, carried, reset: model(tokens, carried), parts, state, in_place=True):
        state = out.state
    most = in_memory(device, peak=True)
    size = states.nbytes(state.layers[0])
    return (None if most is None or before is None else (most - before) / size), state


def products(q_HNE: Tensor, k_HME: Tensor) -> None:
    """Compute all products, in chunks that are discarded."""
    scratch_CN = k_HME.new_empty(CHUNK, q_HNE.shape[1])
    for q_NE, k_ME in zip(q_HNE, k_HME, strict=True):
        for k_CE in k_ME.split(CHUNK):
            torch.mm(k_CE, q_NE.mT, out=scratch_CN[: len(k_CE)])


def plain(q_BHNE: Tensor, found: NeighbourStore, memory: Memorizing) -> None:
    """Compute all products at once, mask empty slots, take the top k and attend to them."""
    empty_B11M = torch.arange(found.k_BHME.shape[2], device=q_BHNE.device) >= found.filled_B[:, None, None, None]
    index_BHNK = (q_BHNE @ found.k_BHME.mT).masked_fill(empty_B11M, -torch.inf).topk(memory.k, -1).indices
    attend(q_BHNE, found, index_BHNK, memory.scale_H.abs())


@torch.no_grad()
def measure_store(keys: int, rounds: int, device: str = "cpu") -> command.Measurement:
    """Measure one size; `kept` and `plain` are None if their products do not fit."""
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
    seconds = {name: times[name].seconds if name in times else None for name in ("kept", "plain", "written", "copied")}
    size = {"keys": keys, "mebibytes": states.nbytes(found) / 2**20, "resident": held}
    return {**size, "read": times["read"], "products": times["products"].seconds, **seconds}


def read_text(keys: int, tokens: int, device: str, width: int = 64, heads: int = 2) -> list[command.Measurement]:
    """Process a text of random bytes with a narrow model whose store is overwritten repeatedly; a row per tenth."""
    model, tenths = build(keys, device, width, heads), list[command.Measurement]()
    clock, done = time.perf_counter(), 0
    for now in read_stream(model, random_bytes(tokens + 1), SEGMENT, in_place=True):
        if now.tokens >= max(tokens // 10, 1) * (len(tenths) + 1):
            passed, clock = time.perf_counter() - clock, time.perf_counter()
            memory = (in_memory(device) or 0) / 2**20
            tenths.append({"tokens": now.tokens, "mebibytes": memory, "speed": (now.tokens - done) / passed})
            done = now.tokens
    return tenths


def random_bytes(tokens: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, tokens, 10_000):
        yield torch.randint(256, (min(10_000, tokens - begin),), generator=generator).tolist()


def as_markdown(stores: list[command.Measurement], tenths: list[command.Measurement], keys: int) -> str:
    """Write two tables: the stores, and the text."""

    def milliseconds(name: str) -> Callable[[command.Measurement], str]:
        return lambda row: "does not fit" if row[name] is None else f"{1000 * row[name]:,.1f}"

    columns: dict[str, Callable[[command.Measurement], str]] = {
        "keys": lambda row: f"{row['keys']:,}",
        "store (MiB)": lambda row: f"{row['mebibytes']:,.0f}",
        "in memory, store = 1": lambda row: "" if row["resident"] is None else f"{row['resident']:.2f}",
        "read (ms)": lambda row: f"{1000 * row['read'].seconds:,.1f}",
        "products only = 1": lambda row: str(row["read"]),
        "products, kept (ms)": milliseconds("kept"),
        "plain form (ms)": milliseconds("plain"),
        "write in place (ms)": milliseconds("written"),
        "write a copy (ms)": milliseconds("copied"),
    }
    speed = statistics.median(row["speed"] for row in tenths)
    title = f"{tenths[-1]['tokens']:,} tokens with {keys:,} keys, {speed:,.0f} a second, at each tenth"
    lines = [["MiB", *(f"{row['mebibytes']:,.0f}" for row in tenths)]]
    lines.append(["tokens/s", *(f"{row['speed']:,.0f}" for row in tenths)])
    below = command.table([title, *(f"{n}/10" for n in range(1, len(tenths) + 1))], lines)
    return command.columns_table(stores, columns) + "\n\n" + below


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
