"""LaCT against a twin of loops, golden values of the released function, its limits, stability.

Legend: B rows, G nets, N tokens, H heads, E head width, D model width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories.harness import (
    HEADS,
    WIDTH,
    SlowMemory,
    build,
    long_streams,
    paddings,
    same_as_twin,
    segments,
    slowly,
    wild,
)
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import state as states
from cached_transformers.interfaces.memory import ProjectKV, Query, Reading, Trace
from cached_transformers.memories.lact import NEWTON_SCHULZ, LaCT, LaCTState, Nets, apply, descent, rows_like
from cached_transformers.memories.parts.fast_weights import newton_schulz


def layer(**options: Any) -> LaCT:
    """A memory whose parameters all differ from where they begin."""
    torch.manual_seed(0)
    return wild(LaCT(WIDTH, HEADS, **{"nets": 2, **options}))  # type: ignore[no-any-return]


class SlowLaCT(SlowMemory):
    """A layer's LaCT by loops over rows, nets and tokens, its gradient from autograd."""

    fast: LaCT

    def _read_with(self, state: LaCTState, row: int, net: int) -> list[Tensor]:
        initial = [t[net] for t in self.fast.initial]
        if state.tokens_B[row] == 0:
            return initial
        kept = [t[row, net] for t in state.weights]
        if not self.fast.normed_when_read:
            return kept
        return [self._rows(w, i) for w, i in zip(kept, initial, strict=True)]

    @staticmethod
    def _rows(t: Tensor, like: Tensor) -> Tensor:
        pairs = zip(t, like, strict=True)
        return torch.stack([row / (row.square().sum().sqrt() + 1e-5) * old.square().sum().sqrt() for row, old in pairs])

    def _part(self, t_HE: Tensor, net: int) -> Tensor:
        return t_HE.flatten().chunk(self.fast.nets)[net]

    def _asking(self, t_HE: Tensor, which: int, net: int) -> Tensor:
        t_D = t_HE.flatten() * self.fast.scale_2D[which] + self.fast.offset_2D[which]
        t_K = F.silu(t_D.chunk(self.fast.nets)[net])
        return t_K / (t_K.square().sum().sqrt() + 1e-5)

    def read(self, opened: LaCTState, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.q_BHNE is not None
        fast, rows = self.fast, []
        for row in range(len(query.x_BND)):
            tokens = []
            for t, x_D in enumerate(query.x_BND[row]):
                parts = []
                for net in range(fast.nets):
                    W0, W1, W2 = self._read_with(opened, row, net)
                    q = self._asking(query.q_BHNE[row, :, t], 0, net)
                    f = W1 @ (F.silu(W0 @ q) * (W2 @ q))
                    normed = f / (f.square().mean() + 1e-5).sqrt() * fast.norm.weight
                    parts.append(F.silu(fast.scale(x_D)[net]) * normed)
                tokens.append(torch.cat(parts))
            rows.append(torch.stack(tokens))
            if fast.bypass and opened.tokens_B[row] == 0:
                rows[-1] = torch.zeros_like(rows[-1])
        return Reading(None, torch.stack(rows).unflatten(-1, (fast.heads, -1)).transpose(1, 2))

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        return y_BHNE + reading.output_BHNE

    def write(self, state: LaCTState, trace: Trace) -> tuple[LaCTState, None]:
        fast, query = self.fast, trace.query
        assert query.k_BHNE is not None and query.v_BHNE is not None
        weights: list[list[Tensor]] = [[], [], []]
        momenta: list[list[Tensor]] = [[], [], []]
        counts = []
        for row in range(len(query.x_BND)):
            there = [t for t in range(query.x_BND.shape[1]) if query.padding_BN is None or not query.padding_BN[row, t]]
            counts.append(len(there))
            for net in range(fast.nets):
                kept, empty = [t[row, net] for t in state.weights], bool(state.tokens_B[row] == 0)
                moved = [t[row, net] for t in state.momentum]
                if there:
                    kept, moved = self._updated(state, row, net, query, there, empty)
                for lists, parts in ((weights, kept), (momenta, moved)):
                    for one, part in zip(lists, parts, strict=False):
                        one.append(part)
        shaped = [
            Nets(*(torch.stack(t).unflatten(0, (-1, fast.nets)) for t in lists)) if lists[0] else ()
            for lists in (weights, momenta)
        ]
        return LaCTState(*shaped, state.tokens_B + torch.tensor(counts)), None  # type: ignore[arg-type]

    def _updated(
        self, state: LaCTState, row: int, net: int, query: Query, there: list[int], empty: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        assert query.k_BHNE is not None and query.v_BHNE is not None
        fast, initial = self.fast, [t[net] for t in self.fast.initial]
        used = self._read_with(state, row, net)
        leaves = [t if t.requires_grad else t.clone().requires_grad_() for t in used]
        steps = [torch.zeros_like(t) for t in used]
        for t in there:
            k, v = self._asking(query.k_BHNE[row, :, t], 1, net), F.silu(self._part(query.v_BHNE[row, :, t], net))
            rates = F.softplus(fast.rates(query.x_BND[row, t])).view(3, fast.nets)[:, net]
            with torch.enable_grad():
                W0, W1, W2 = leaves
                loss = -(v @ (W1 @ (F.silu(W0 @ k) * (W2 @ k))))
                gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            steps = [s - rate * g for s, rate, g in zip(steps, rates, gradients, strict=True)]
        momentum: list[Tensor] = []
        if fast.keeping is not None:
            share = torch.stack([torch.sigmoid(fast.keeping(query.x_BND[row, t])[net]) for t in there]).mean()
            if not empty:
                steps = [s + share * p[row, net] for s, p in zip(steps, state.momentum, strict=True)]
            momentum = steps
        if fast.muon:
            steps = [newton_schulz(s, NEWTON_SCHULZ) for s in steps]
        if fast.normed_when_read:
            before = initial if empty else [t[row, net] for t in state.weights]
            return [w + s for w, s in zip(before, steps, strict=True)], momentum
        return [self._rows(w + s, i) for w, s, i in zip(used, steps, initial, strict=True)], momentum


BOTH = {"muon": True, "momentum": True}
KINDS = [
    {"nets": 2, **BOTH},
    {"nets": 1, "expansion": 2, "first": "apply", "keep": "sum", **BOTH},
    {"nets": 2, "momentum": True, "rate": 0.3},
    {"nets": 4, "keep": "sum", "rate": 1.0},
    {"nets": 2, "muon": True},
]


@pytest.mark.parametrize(
    ("options", "padded"), [*((o, True) for o in KINDS), *((o, False) for o in KINDS[:2])], ids=str
)
def test_a_model_is_its_slow_twin_with_gradients(options: dict[str, Any], padded: bool) -> None:
    model = build({"name": "lact", **options})
    same_as_twin(model, slowly(model, SlowLaCT), segments(4), paddings(4) if padded else [None] * 4)


@pytest.mark.device
@pytest.mark.parametrize("kept", ["out", "prenorm_out"])
@pytest.mark.parametrize("tag", ["plain", "momentum", "muon", "muon_momentum"])
def test_chunks_read_and_write_as_the_released_function_does(shared: Path, tag: str, kept: str) -> None:
    """Four chunks, of 4 tokens and the last one of 2, which is read alone."""
    given = {k: torch.tensor(v) for k, v in np.load(shared / "golden/recurrent/lact.npz").items()}
    initial = Nets(given["w0"], given["w1"], given["w2"])
    nets, sums, momentum, outs = initial, initial, Nets(*map(torch.zeros_like, initial)), []
    names = ("q", "k", "v", "lr0", "lr1", "lr2", "momentum")
    for q, k, v, *rates, keeping in zip(*(given[n].split(int(given["chunk"]), 1) for n in names), strict=True):
        outs.append(apply(nets, q))
        steps = descent(nets, k, v, tuple(rates))
        if "momentum" in tag:
            share = keeping.mean(1, keepdim=True)
            steps = momentum = Nets(*(g + share * p for g, p in zip(steps, momentum, strict=True)))
        if "muon" in tag:
            steps = Nets(*(newton_schulz(t, NEWTON_SCHULZ) for t in steps))
        sums = Nets(*(w + s for w, s in zip(sums if kept == "prenorm_out" else nets, steps, strict=True)))
        nets = Nets(*map(rows_like, sums, initial))
    torch.testing.assert_close(torch.cat(outs, 1), given[f"{tag}/{kept}"], rtol=0, atol=1e-12)


@pytest.mark.device
def test_newton_schulz_gives_recorded_values(shared: Path) -> None:
    given = np.load(shared / "golden/recurrent/lact.npz")
    got = newton_schulz(torch.tensor(given["newton_schulz/in"]), NEWTON_SCHULZ)
    torch.testing.assert_close(got, torch.tensor(given["newton_schulz/out"]), rtol=0, atol=1e-12)
    assert (torch.linalg.svdvals(got) - 1).abs().max() < 0.3
    assert torch.equal(newton_schulz(torch.zeros(3, 4), NEWTON_SCHULZ), torch.zeros(3, 4))


def drive(tokens: int, dtype: torch.dtype, seed: int, segment: int, **options: Any) -> None:
    """Streams of three tokens again and again, of new ones, and both a thousand times as large; the largest rates."""
    torch.manual_seed(seed)
    memory = LaCT(WIDTH, HEADS, nets=2, **options).to(dtype).eval()
    generator, sizes = torch.Generator().manual_seed(seed), torch.tensor([1.0, 1000.0, 1.0, 1000.0])[:, None, None]
    with torch.no_grad():
        nn.init.constant_(memory.rates.bias, 50.0)
        state = memory.init_state(4, torch.zeros((), dtype=dtype))
        for _ in range(tokens // segment):
            new = torch.randn(2, segment, 3 * WIDTH, generator=generator)
            new[0] = new[0, :3].repeat(segment // 3 + 1, 1)[:segment]
            given = (sizes * new.repeat_interleave(2, 0)).to(dtype)
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in given.chunk(3, -1))
            query = Query(given[..., :WIDTH], q, k_BHNE=k, v_BHNE=v)
            reading = memory.read(memory.open(state, None, None), query, None)
            assert reading.output_BHNE is not None and reading.output_BHNE.isfinite().all()
            state = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))[0]
    for name, t in states.named_tensors(state):
        assert t.isfinite().all(), name
    for kept, initial in zip(memory.open(state, None, None).weights, memory.initial, strict=True):
        assert (kept.norm(dim=-1) <= 1.001 * initial.float().norm(dim=-1)).all()


HARD = [BOTH, {"keep": "sum", **BOTH}, {"momentum": True}, {"keep": "sum"}]


@pytest.mark.parametrize("segment", [256, 64])
@long_streams
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", HARD, ids=str)
def test_repeated_inputs_of_any_size_leave_it_finite(
    options: dict[str, Any], dtype: torch.dtype, tokens: int, seed: int, segment: int
) -> None:
    drive(tokens, dtype, seed, segment, **options)


def test_nets_are_as_many_as_divide_the_width() -> None:
    assert [LaCT(width, 1).nets for width in (8, 6, 5)] == [4, 2, 1]
