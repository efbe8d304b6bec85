"""Every attention mechanism against length: time and peak memory of forward and backward, beside exact attention.

At each length all mechanisms are timed in turn with PyTorch's fused exact attention, in one process, at the sizes that
their papers take. How time grows is the slope of log time over log length, by least squares, over the longer half of
the lengths. Published implementations that are installed are timed at their own call on the same tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.reports.markdown import table
from cached_transformers.attentions import Attention, create_attention
from cached_transformers.interfaces.attention import AttentionOutput
from cached_transformers.registry import ATTENTIONS

from .attention_peers import PEERS, Peer
from .interleaved import Ratio, compare, seconds_of
from .peers import lacking

EXACT = "softmax"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_WIDTH = 4, 64

LONGEST = {"sac": 4096}
"""Where a mechanism's memory ends the measurement: SAC's choice keeps N x N probabilities for each of its 8 edges."""


@dataclass(frozen=True)
class Row:
    """Measurements of one mechanism.

    Attributes:
        causal: whether the causal form was timed: for mechanisms that have no other.
        seconds: of one forward and backward, by length. mebibytes: most that was alive at once.
        exact: the time over that of exact attention in the same round.
        slope: of log time over log length, over the longer half of the lengths.
        flops: counted operations over those of exact attention, at `compared_at`; none where it was not timed there.
        peer: time of the peer over ours at that length. `peer_name` of a peer that could not be built says why.
    """

    attention: str
    order: str
    causal: bool
    seconds: dict[int, float]
    mebibytes: dict[int, float]
    exact: dict[int, Ratio]
    slope: float
    flops: float | None = None
    peer: Ratio | None = None
    peer_name: str = ""


def inputs(length: int, device: str, dtype: torch.dtype = torch.float32, rows: int = 1) -> dict[str, Tensor]:
    """Queries, keys, values (rows, H, length, E) and the layer's input, with gradient."""
    generator = torch.Generator().manual_seed(length)
    shape = (rows, HEADS, length, HEAD_WIDTH)
    given = {name: torch.randn(shape, generator=generator) for name in "qkv"}
    given["x"] = torch.randn(rows, length, HEADS * HEAD_WIDTH, generator=generator)
    return {name: t.to(device, dtype).requires_grad_() for name, t in given.items()}


def build(name: str, length: int, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Attention:
    """The mechanism at the sizes of its paper, in training mode."""
    torch.manual_seed(0)
    spec = {"name": name, **options}
    facts = {"width": HEADS * HEAD_WIDTH, "heads": HEADS, "length": length, "prefix": 0, "index": 0, "depth": 1}
    return create_attention(spec, **facts).to(device, dtype).train()


class Projected(nn.Module):
    """A core with the projections of a layer round it."""

    def __init__(self, core: Attention) -> None:
        super().__init__()
        width = HEADS * HEAD_WIDTH
        self.core, self.enter, self.leave = core, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, *_: Tensor, causal: bool, x_BND: Tensor) -> AttentionOutput:
        """The core's result on the projected input, projected; queries, keys and values given are not read."""
        q, k, v = self.enter(x_BND).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        out: AttentionOutput = self.core(q, k, v, causal=causal, x_BND=x_BND)
        return out._replace(out_BHNV=self.leave(out.out_BHNV.transpose(1, 2).flatten(2)))


def step_of(core: nn.Module, given: Mapping[str, Tensor], causal: bool) -> Callable[[], None]:
    """One forward and backward."""

    def step() -> None:
        out = core(given["q"], given["k"], given["v"], causal=causal, x_BND=given["x"])
        total = out.out_BHNV.sum() if out.auxiliary_loss is None else out.out_BHNV.sum() + out.auxiliary_loss
        total.backward()
        for t in (*given.values(), *core.parameters()):
            t.grad = None

    return step


def slope(seconds: Mapping[int, float]) -> float:
    """Least-squares slope of log time over log length, over the longer half of the lengths (two at least)."""
    lengths = sorted(seconds)[-max(2, (len(seconds) + 1) // 2) :]
    if len(lengths) < 2:
        return math.nan
    x, y = ([math.log(v) for v in values] for values in (lengths, [seconds[n] for n in lengths]))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def measure(
    names: Sequence[str], lengths: Sequence[int], rounds: int, device: str, dtype: torch.dtype = torch.float32
) -> list[Row]:
    """Time the mechanisms, and exact attention with them, length by length; the rows are in order of the names."""
    kinds: dict[str, Any] = {name: ATTENTIONS.entry(name).factory for name in names}
    causal = {name: "bidirectional" not in kind.can for name, kind in kinds.items()}
    seconds: dict[str, dict[int, float]] = {name: {} for name in names}
    mebibytes: dict[str, dict[int, float]] = {name: {} for name in names}
    exact: dict[str, dict[int, Ratio]] = {name: {} for name in names}
    flops: dict[str, float] = {}
    for length in lengths:
        given = inputs(length, device, dtype)
        able = [name for name in names if length <= LONGEST.get(name, length)]
        steps = {name: step_of(build(name, length, device, dtype), given, causal[name]) for name in able}
        steps[EXACT] = step_of(build(EXACT, length, device, dtype), given, False)
        causal_exact = step_of(build(EXACT, length, device, dtype), given, True)
        reference = {"exact, causal": causal_exact} if any(causal[name] for name in able) else {}
        ratios = compare({**steps, **reference}, EXACT, rounds)
        for name in able:
            timed = ratios[name]
            if causal[name]:
                timed = compare({name: steps[name], "exact": causal_exact}, "exact", rounds)[name]
            seconds[name][length], exact[name][length] = timed.seconds, timed
            mebibytes[name][length] = peak_bytes(steps[name], device) / 2**20
        if length == compared_at(lengths):
            of_exact = {False: flops_of(steps[EXACT]), True: flops_of(causal_exact)}
            flops = {name: flops_of(steps[name]) / of_exact[causal[name]] for name in able}
    rows = []
    for name in names:
        order = str(ATTENTIONS.entry(name).info.get("order", ""))
        peer = PEERS.get(name)
        beside, peer_name = (None, "") if peer is None else _beside(name, peer, compared_at(lengths), rounds, device)
        measured = seconds[name], mebibytes[name], exact[name], slope(seconds[name])
        rows.append(Row(name, order, causal[name], *measured, flops.get(name), beside, peer_name))
    return rows


def compared_at(lengths: Sequence[int]) -> int:
    """The length of 4096, or the longest that is shorter, at which peers are timed and operations counted."""
    return max([n for n in lengths if n <= 4096] or [min(lengths)])


def _beside(name: str, peer: Peer, length: int, rounds: int, device: str) -> tuple[Ratio | None, str]:
    """Time of the peer over ours, and what the peer is called; or none, and what it lacks."""
    given = inputs(length, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            other = peer.build(length, HEADS, HEAD_WIDTH, device)
        except ModuleNotFoundError as error:
            return None, lacking(peer.distribution, error)

        def their_step() -> None:
            other(given).sum().backward()
            for t in given.values():
                t.grad = None

        core = build(name, length, device, **peer.options)
        ours = step_of(Projected(core).to(device) if peer.projects else core, given, peer.causal)
        return compare({"ours": ours, "peer": their_step}, "ours", rounds)["peer"], peer.distribution


def run(
    rounds: int,
    only: str = "all",
    lengths: Sequence[int] = LENGTHS,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """Measure every mechanism, or those named in `only` (by commas), on inputs of a dtype; peers always in float32."""
    names = ATTENTIONS.names() if only == "all" else only.split(",")
    for name in names:
        ATTENTIONS.entry(name)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths {list(lengths)} must be numbers of tokens, at least 1")
    for name in names:
        if min(lengths) > LONGEST.get(name, min(lengths)):
            raise ValueError(f"{name} is measured up to {LONGEST[name]} tokens; add a length that is not above it")
    seconds_of(step_of(build(EXACT, 64, device), inputs(64, device), False))  # whatever the first call sets up
    return measure(names, sorted(lengths), rounds, device, dtype)


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: time over that of exact attention at each length, and how it grows."""
    lengths = sorted({n for row in rows for n in row.exact})
    counted = f"FLOPs at {compared_at(lengths):,}"
    at_end = f"MiB at {lengths[-1]:,}"
    head = ["attention", "order", *(f"{n:,}" for n in lengths), counted, "slope", at_end, "peer, ours = 1"]
    cells = []
    for row in rows:
        times = [f"{row.exact[n].median:.2f}" if n in row.exact else "" for n in lengths]
        peer = f"{row.peer} {row.peer_name}" if row.peer else row.peer_name
        flops = "" if row.flops is None else f"{row.flops:.3f}"
        name = f"{row.attention}, causal" if row.causal else row.attention
        memory = f"{row.mebibytes[lengths[-1]]:,.0f}" if lengths[-1] in row.mebibytes else ""
        cells.append([name, row.order, *times, flops, f"{row.slope:.2f}", memory, peer])
    return table(head, cells)
