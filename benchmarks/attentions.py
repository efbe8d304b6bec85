"""Every attention mechanism against length: time and peak memory of forward and backward, next to exact attention.

At each length all mechanisms are timed in turn with PyTorch's fused exact attention, at the sizes of their papers.
Growth is the least-squares slope of log time over log length, over the longer half of the lengths. Installed published
implementations are timed at their own call on the same tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.attention_peers import PEERS
from benchmarks.memory_peers import lacking
from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.costs.timing import Ratio, compare, seconds_of
from cached_transformers.attentions import Attention, create_attention
from cached_transformers.interfaces.attention import AttentionOutput
from cached_transformers.registry import ATTENTIONS

EXACT = "softmax"
HEADS, HEAD_WIDTH = 4, 64
LONGEST = {"sac": 4096}
"""Longest measured length: SAC keeps N x N probabilities for each of its 8 edges."""


def add_options(parser: argparse.ArgumentParser) -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    parser.add_argument("--attentions", default="all", help="names separated by commas (default: all)")
    parser.add_argument("--lengths", type=command.numbers, default=lengths, help="tokens, separated by commas")
    command.add_dtype(parser, "of inputs; peers are always timed in float32")


def measure(options: argparse.Namespace) -> command.Result:
    names = ATTENTIONS.names() if options.attentions == "all" else options.attentions.split(",")
    lengths, device = sorted(options.lengths), options.device
    for name in names:
        ATTENTIONS.entry(name)
        if lengths[0] > LONGEST.get(name, lengths[0]):
            raise ValueError(f"{name} is measured up to {LONGEST[name]} tokens; add a length that is not above it")
    seconds_of(step_of(build(EXACT, 64, device), inputs(64, device), False))  # sets up everything lazy
    rows = measure_names(names, lengths, options.rounds, device, command.dtype_of(options))
    return command.Result(rows, as_markdown(rows), {"dtype": options.dtype})


def inputs(length: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return queries, keys, values (1, H, length, E) and the layer's input, all with gradient."""
    generator = torch.Generator().manual_seed(length)
    given = {name: torch.randn((1, HEADS, length, HEAD_WIDTH), generator=generator) for name in "qkv"}
    given["x"] = torch.randn(1, length, HEADS * HEAD_WIDTH, generator=generator)
    return {name: t.to(device, dtype).requires_grad_() for name, t in given.items()}


def build(name: str, length: int, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Attention:
    """Build the mechanism at the sizes of its paper, in training mode."""
    torch.manual_seed(0)
    facts = {"width": HEADS * HEAD_WIDTH, "heads": HEADS, "length": length, "prefix": 0, "index": 0, "depth": 1}
    return create_attention({"name": name, **options}, **facts).to(device, dtype).train()


class ProjectedAttention(nn.Module):
    """A mechanism with the projections of a layer around it; given queries, keys and values are not used."""

    def __init__(self, core: Attention) -> None:
        super().__init__()
        width = HEADS * HEAD_WIDTH
        self.core, self.enter, self.leave = core, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, *_: Tensor, causal: bool, x_BND: Tensor) -> AttentionOutput:
        q, k, v = self.enter(x_BND).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        out: AttentionOutput = self.core(q, k, v, causal=causal, x_BND=x_BND)
        return out._replace(out_BHNV=self.leave(out.out_BHNV.transpose(1, 2).flatten(2)))


def step_of(core: nn.Module, given: Mapping[str, Tensor], causal: bool) -> Callable[[], None]:
    """Return a forward and backward pass."""

    def step() -> None:
        out = core(given["q"], given["k"], given["v"], causal=causal, x_BND=given["x"])
        total = out.out_BHNV.sum() if out.auxiliary_loss is None else out.out_BHNV.sum() + out.auxiliary_loss
        total.backward()
        for t in (*given.values(), *core.parameters()):
            t.grad = None

    return step


def step_of_peer(run: Callable[[Mapping[str, Tensor]], Tensor], given: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a forward and backward pass of a published implementation."""

    def step() -> None:
        run(given).sum().backward()
        for t in given.values():
            t.grad = None

    return step


def is_causal(name: str) -> bool:
    """Return whether the mechanism has a causal form only."""
    factory: Any = ATTENTIONS.entry(name).factory
    return "bidirectional" not in factory.can


def slope(seconds: Mapping[int, float]) -> float:
    """Least-squares slope of log time over log length, over the longer half of the lengths (at least two)."""
    lengths = sorted(seconds)[-max(2, (len(seconds) + 1) // 2) :]
    if len(lengths) < 2:
        return math.nan
    x, y = ([math.log(v) for v in values] for values in (lengths, [seconds[n] for n in lengths]))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def measure_names(
    names: Sequence[str], lengths: Sequence[int], rounds: int, device: str, dtype: torch.dtype
) -> list[command.Measurement]:
    """Time the mechanisms, and exact attention with them, length by length."""
    rows: dict[str, command.Measurement] = {
        name: {
            "attention": name,
            "order": str(ATTENTIONS.entry(name).info.get("order", "")),
            "causal": is_causal(name),
            "flops": None,
            **{key: {} for key in ("seconds", "mebibytes", "exact")},
        }
        for name in names
    }
    for length in lengths:
        given = inputs(length, device, dtype)
        able = [name for name in names if length <= LONGEST.get(name, length)]
        steps = {name: step_of(build(name, length, device, dtype), given, rows[name]["causal"]) for name in able}
        exact = {causal: step_of(build(EXACT, length, device, dtype), given, causal) for causal in (False, True)}
        steps[EXACT] = exact[False]
        reference = {"exact, causal": exact[True]} if any(rows[name]["causal"] for name in able) else {}
        ratios = compare({**steps, **reference}, EXACT, rounds)
        for name in able:
            row, time = rows[name], ratios[name]
            if row["causal"]:
                time = compare({name: steps[name], "exact": exact[True]}, "exact", rounds)[name]
            row["seconds"][length], row["exact"][length] = time.seconds, time
            row["mebibytes"][length] = peak_bytes(steps[name], device) / 2**20
            if length == compared_at(lengths):
                row["flops"] = flops_of(steps[name]) / flops_of(exact[row["causal"]])
    for name, row in rows.items():
        row["peer"], row["peer_name"] = compare_peer(name, compared_at(lengths), rounds, device)
        row["slope"] = slope(row["seconds"])
    return list(rows.values())


def compared_at(lengths: Sequence[int]) -> int:
    """Return the longest length up to 4096, at which peers are timed and operations counted."""
    return max([n for n in lengths if n <= 4096] or [min(lengths)])


def compare_peer(name: str, length: int, rounds: int, device: str) -> tuple[Ratio | None, str]:
    """Return the time of the peer over ours and its distribution; None and a reason if it cannot be built."""
    if name not in PEERS:
        return None, ""
    peer, given = PEERS[name], inputs(length, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = step_of_peer(peer.build(length, HEADS, HEAD_WIDTH, device), given)
        except ModuleNotFoundError as error:
            return None, lacking(peer.distribution, error)
        core = build(name, length, device, **peer.options)
        ours = step_of(ProjectedAttention(core).to(device) if peer.projects else core, given, peer.causal)
        return compare({"ours": ours, "peer": theirs}, "ours", rounds)["peer"], peer.distribution


def as_markdown(rows: Sequence[command.Measurement]) -> str:
    """Write the rows as a Markdown table: time over exact attention at each length, and its growth."""
    lengths = sorted({n for row in rows for n in row["exact"]})
    head = ["attention", "order", *(f"{n:,}" for n in lengths), f"FLOPs at {compared_at(lengths):,}", "slope"]
    cells = []
    for row in rows:
        line = [f"{row['attention']}, causal" if row["causal"] else row["attention"], row["order"]]
        line += [f"{row['exact'][n].median:.2f}" if n in row["exact"] else "" for n in lengths]
        line += ["" if row["flops"] is None else f"{row['flops']:.3f}", f"{row['slope']:.2f}"]
        line += [f"{row['mebibytes'][lengths[-1]]:,.0f}" if lengths[-1] in row["mebibytes"] else ""]
        cells.append([*line, f"{row['peer']} {row['peer_name']}" if row["peer"] else row["peer_name"]])
    return command.table([*head, f"MiB at {lengths[-1]:,}", "peer, ours = 1"], cells)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
