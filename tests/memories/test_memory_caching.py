"""Memory Caching: recorded values, a slow twin over both memories, the limits in which it is something simpler, and
what is kept, dropped and refused.

Legend: B rows, N tokens, S slots, H heads, K width of keys, V of values, D model width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from memories.harness import HEADS, WIDTH, agree, inputs, run_layer
from memories.memory_caching_twin import slowly
from torch import Tensor

from cached_transformers.interfaces.incremental import needs_whole_segments
from cached_transformers.interfaces.memory import Query
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories import create_memory
from cached_transformers.memories.memory_caching import (
    CachedStates,
    MemoryCaching,
    digits,
    gates,
    merged,
    running_means,
    snapshot_memories,
)
from cached_transformers.memories.parts.recurrent import Recurrent, mix
from cached_transformers.registry import MEMORIES

ROWS = 2
STARTS, READS = ("checkpoint", "restart"), ("residual", "gated", "sparse", "soup")
INFINI = {"name": "infini", "initial_gate": 0.4}
TITANS = {"name": "titans", "chunk": 2}
DEEP = {"name": "titans", "chunk": 2, "layers": 2, "expansion": 2, "nets": 4, "mix": "sum"}
TTT = {"name": "ttt", "mini_batch": 3}
MLP = {"name": "ttt", "mini_batch": 2, "model": "mlp", "rotary": False}
BELOW = {"infini": INFINI, "titans": TITANS, "deep": DEEP, "ttt": TTT, "mlp": MLP}
over_each = pytest.mark.parametrize("over", BELOW.values(), ids=list(BELOW))


def layer_of(memory: Any, wild: float = 0.5) -> SelfAttention:
    """A layer in float64, the same weights at every call; those of another memory below differ in nothing else."""
    layer = SelfAttention(WIDTH, HEADS, memory=create_memory(memory, WIDTH, HEADS), causal=True).double()
    for name, parameter in layer.named_parameters():
        torch.manual_seed(sum(map(ord, name.replace("memory.over.", "memory."))))
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            elif name in ("qkv.bias", "output.bias"):
                parameter.zero_()
            parameter.add_(wild * torch.randn_like(parameter))
    return layer


def caching(over: Any, **options: Any) -> dict[str, Any]:
    return {"name": "memory_caching", "over": over, **options}


class Golden:
    """Recorded values over the gated delta rule: its states by a loop over tokens, and what is asked of them."""

    def __init__(self, folder: Path, start: str) -> None:
        stored = np.load(folder / "golden/recurrent/memory_caching.npz", allow_pickle=False)
        given = {k: torch.tensor(v) for k, v in stored.items()}
        self.q, self.k, self.v, self.u = (given[name].transpose(1, 2) for name in "qkvu")  # (B, H, N, ...)
        self.beta, self.g = given["beta"].mT, given["g"].mT
        self.segment, self.topk = int(given["segment"]), int(given["top_k"])
        self.expected = {k.removeprefix(f"{start}/"): v for k, v in given.items() if k.startswith(start)}
        self.restarts, self.tokens = start == "restart", self.q.shape[2]

    def token(self, S_BHKV: Tensor, t: int) -> Tensor:
        k, v = self.k[:, :, t, :, None], self.v[:, :, t, None]
        S_BHKV = self.g[:, :, t, None, None].exp() * S_BHKV
        return S_BHKV + self.beta[:, :, t, None, None] * k * (v - (k * S_BHKV).sum(2, keepdim=True))

    def outputs(self, slots: int, read: str) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, H, V) as they are recorded, (B, S, H, K, V) ends, and (B, N, H, S + 1) weights, by a ring."""
        b, h, _, width = self.k.shape
        S_BHKV = zero = torch.zeros(b, h, width, self.v.shape[-1], dtype=torch.float64)
        ring_BSHKV, contexts_BSHK = zero.new_zeros(b, slots, *zero.shape[1:]), zero.new_zeros(b, slots, h, width)
        outputs, ends, weights = [], [], []
        for index, start in enumerate(range(0, self.tokens, self.segment)):
            places = range(start, min(start + self.segment, self.tokens))
            n = slice(places.start, places.stop)
            online, valid_BS = [], (torch.arange(slots) < index).expand(b, -1)
            for t in places:
                S_BHKV = self.token(S_BHKV, t)
                online.append((self.q[:, :, t, :, None] * S_BHKV).sum(2))
            keys, none = self.k[:, :, n], torch.zeros_like(self.k[:, :, 0])
            means = running_means(keys, None, none, 0)
            w = gates(
                self.u[:, :, n],
                contexts_BSHK.permute(0, 2, 3, 1),
                means,
                ~valid_BS,
                self.topk if read == "sparse" else None,
            )
            shares = (
                torch.cat([valid_BS, valid_BS.new_ones(b, 1)], 1)[:, None, None].double() if read == "residual" else w
            )
            answers = self.q[:, None, :, n] @ ring_BSHKV
            outputs.append(mix(answers, torch.stack(online, 2), shares.expand(-1, h, len(places), -1)))
            weights.append(w)
            ends.append(S_BHKV)
            if index < slots:
                ring_BSHKV, contexts_BSHK = ring_BSHKV.clone(), contexts_BSHK.clone()
                ring_BSHKV[:, index], contexts_BSHK[:, index] = S_BHKV, means[:, :, -1]
            S_BHKV = zero if self.restarts else S_BHKV
        return torch.cat(outputs, 2).transpose(1, 2), torch.stack(ends, 1), torch.cat(weights, 2).transpose(1, 2)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("read", READS)
def test_recorded_values_over_the_gated_delta_rule(shared: Path, start: str, read: str) -> None:
    golden = Golden(shared, start)
    found, ends, weights = golden.outputs(slots=3, read=read)
    torch.testing.assert_close(ends, golden.expected["ends"], rtol=0, atol=1e-12)
    torch.testing.assert_close(found, golden.expected[read], rtol=0, atol=1e-12)
    if read != "sparse":
        recorded = golden.expected["weights"]  # of as many as the token's segment has states: its own last
        for t in range(golden.tokens):
            index = t // golden.segment
            torch.testing.assert_close(weights[:, t, :, :index], recorded[:, t, :, :index], rtol=0, atol=1e-12)
            torch.testing.assert_close(weights[:, t, :, 3], recorded[:, t, :, index], rtol=0, atol=1e-12)


def hidden(given: list[Tensor]) -> list[Tensor]:
    """Padding in front, in the middle and behind; a row that begins later, and one that pauses."""
    padding = [torch.zeros(x.shape[:2], dtype=torch.bool) for x in given]
    padding[0][1], padding[1][0, 0], padding[2][1, 1:3], padding[3][0], padding[4][1, -1] = (True,) * 5
    return padding


@over_each
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("read", READS)
def test_it_is_its_slow_twin_with_gradients(over: dict[str, Any], start: str, read: str) -> None:
    layer = layer_of(caching(over, slots=3, read=read, start=start, topk=2))
    given = [x.requires_grad_() for x in inputs(4, 3, 4, 3, 4, 3)]
    padding = hidden(given)
    wanted, outs = slowly(layer, given, padding), run_layer(layer, given, padding)[0]
    got = [y[place] for y, by_place in zip(outs, wanted, strict=True) for place in by_place]
    leaves = {**dict(layer.named_parameters()), **{f"x{i}": x for i, x in enumerate(given)}}
    flat = torch.stack([y for by_place in wanted for y in by_place.values()])
    agree([torch.stack(got)], [flat], leaves, atol=1e-9, grads=1e-8, rtol=1e-6, least=1e-6)


@pytest.mark.parametrize("read", ["residual", "gated", "sparse"])
@pytest.mark.parametrize("slots", [2, 4])
def test_sums_of_segments_are_those_of_a_slow_counter_with_gradients(read: str, slots: int) -> None:
    layer = layer_of(caching(INFINI, slots=slots, read=read, start="restart", topk=2, keep="powers"), wild=0.2)
    given = [x.requires_grad_() for x in inputs(*[2, 3, 2, 3, 2] * 2)]
    padding = hidden(given)
    wanted, (outs, (*_, state), _) = slowly(layer, given, padding), run_layer(layer, given, padding)
    got = [y[place] for y, by_place in zip(outs, wanted, strict=True) for place in by_place]
    leaves = {**dict(layer.named_parameters()), **{f"x{i}": x for i, x in enumerate(given)}}
    flat = torch.stack([y for by_place in wanted for y in by_place.values()])
    agree([torch.stack(got)], [flat], leaves, atol=1e-9, grads=1e-8, rtol=1e-6, least=1e-6)
    assert state.segments_B.tolist() == [9, 9]


def test_sums_of_powers_of_two_segments_are_all_that_was_written() -> None:
    given = inputs(3, 4, 2, 3, 3, 2, 3)
    plain = run_layer(layer_of(INFINI), given)[0]
    summed = run_layer(layer_of(caching(INFINI, slots=2, read="residual", start="restart", keep="powers")), given)[0]
    torch.testing.assert_close(summed, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("slots", "name"), [(4, "segment_out"), (3, "segment_out"), (2, "all_one_out"), (1, "all_one_out")]
)
def test_recorded_sums_of_log_linear_attention(shared: Path, slots: int, name: str) -> None:
    """A token reads its own segment, up to itself, at level 0, and the sum in slot l at level l + 1."""
    golden = {k: torch.tensor(v) for k, v in np.load(shared / "golden/2026/log_linear.npz").items()}
    q, k, v, scales = (golden[name].transpose(1, 2) for name in ("q", "k", "v", "segment_level_scales"))
    scales = torch.ones_like(scales) if name == "all_one_out" else scales
    size, rows, outs = int(golden["segment"]), len(q), []
    mean_BGK, wrote_B = q.new_zeros(rows, 2, 4), torch.ones(rows, dtype=torch.bool)
    state = CachedStates((), q.new_zeros(rows, slots, 2, 4, 3), q.new_zeros(rows, slots, 2, 4), 0 * wrote_B.long())
    for index, start in enumerate(range(0, q.shape[2], size)):
        levels = set(golden["segment_level_map"][index, :index].tolist())
        assert slots < 3 or {int(i) + 1 for i in digits(state.segments_B, slots)[0].nonzero()} == levels
        q_BHNK, k_BHNK, v_BHNV, scales_BHNL = (t[:, :, start : start + size] for t in (q, k, v, scales))
        read = (q_BHNK[:, None] @ state.snapshots_BS) * scales_BHNL[..., 1 : slots + 1].movedim(-1, 1)[..., None]
        outs.append((q_BHNK @ k_BHNK.mT).tril() @ v_BHNV * scales_BHNL[..., :1] + read.sum(1))
        snapshots_BS, contexts_BSGK = merged(state, k_BHNK.mT @ v_BHNV, mean_BGK, wrote_B)
        state = CachedStates((), snapshots_BS, contexts_BSGK, state.segments_B + 1)
    torch.testing.assert_close(torch.cat(outs, 2).transpose(1, 2), golden[name], rtol=0, atol=1e-12)


@over_each
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("read", READS)
def test_without_a_snapshot_it_is_the_memory_below_to_the_bit(over: dict[str, Any], start: str, read: str) -> None:
    given = inputs(4, 5, 3)
    plain = run_layer(layer_of(over), given)[0]
    first = run_layer(layer_of(caching(over, read=read, start=start)), given[:1])[0]
    assert torch.equal(first[0], plain[0])
    none = run_layer(layer_of(caching(over, slots=0, read=read)), given)[0]
    assert all(map(torch.equal, none, plain))


@pytest.mark.parametrize("start", STARTS)
def test_a_soup_of_matrices_is_gated_and_one_of_nets_is_not(start: str) -> None:
    given = inputs(4, 5, 3, 4)
    for over in (INFINI, TITANS, TTT, TITANS | {"layers": 2}, MLP):
        soup, gated = (
            run_layer(layer_of(caching(over, read=read, start=start)), given)[0] for read in ("soup", "gated")
        )
        if "layers" in over or over is MLP:
            assert (soup[-1] - gated[-1]).abs().max() > 1e-3
        else:
            torch.testing.assert_close(soup, gated, rtol=0, atol=1e-10)


@over_each
@pytest.mark.parametrize("soup", [False, True])
def test_tokens_of_a_model_memory_round_the_segment_ask_and_write_nothing(over: dict[str, Any], soup: bool) -> None:
    memory = layer_of(caching(over, slots=2, read="soup" if soup else "gated")).memory
    past, now = inputs(4, 5)
    q, k, v = torch.randn(3, ROWS, HEADS, 5, WIDTH // HEADS, dtype=torch.float64)
    _, (state, *_), _ = run_layer(layer_of(caching(over, slots=2)), [past])
    alone = memory.read(state, Query(now, q, k_BHNE=k, v_BHNE=v).narrow(1, 3), None)
    around = memory.read(state, Query(now, q, k_BHNE=k, v_BHNE=v, segment=(1, 3)), None)
    assert alone.output_BHNE is not None and around.output_BHNE is not None
    torch.testing.assert_close(around.output_BHNE[:, :, 1:4], alone.output_BHNE, rtol=0, atol=1e-12)
    torch.testing.assert_close(around.carry.context_BGK, alone.carry.context_BGK, rtol=0, atol=1e-12)
    assert around.output_BHNE.shape[2] == 5 and around.output_BHNE.isfinite().all()


class Unmixed(Recurrent):
    """A memory below that is not linear, and has no soup."""

    needs = frozenset({"state", "head"})
    groups, key_width, linear = HEADS, 4, False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()


WRONG = [
    ({"over": "transformer_xl"}, r"over='transformer_xl' has no recurrent state .*; take one of infini, titans, ttt"),
    ({"over": {"name": "memorizing"}}, r"over='memorizing' has no recurrent state .*infini, titans"),
    ({"over": "rmt"}, r"over='rmt' has no recurrent state"),
    ({"over": "memory_caching"}, r"over='memory_caching' has no recurrent state"),
    ({"over": {"name": "titans", "place": "context"}}, r"over='titans' .*place='context'.*take place='gate'"),
    ({"over": "titan"}, r"over='titan': unknown memory .* mean 'titans'\? .*; take one of infini, titans, ttt"),
    ({"over": {"name": "infini", "updat": "delta"}}, r"over={.*}: unknown option of memory 'infini' 'updat'; did you"),
    ({"over": {"slots": 2}}, r"over={'slots': 2}: .* have the key 'name' .*; take one of infini, titans, ttt"),
    ({"over": 3}, r"over=3: .* must be a name, .*; take one of infini"),
    ({"over": None}, r"over=None names no memory .*infini, titans"),
    ({"over": ["infini", "titans"]}, r"several"),
    ({"slots": -1}, r"slots=-1 must not be negative; slots=0 keeps no snapshot"),
    ({"facts": {}}, r"facts="),
    ({"keep": "powers"}, r"keep='powers' .*start='checkpoint'.*take .*start='restart'"),
    ({"keep": "powers", "start": "restart", "over": TITANS}, r"keep='powers' .*over={'name': 'titans'.*over='infini'"),
    ({"keep": "powers", "start": "restart", "slots": 0}, r"keep='powers' .*slots=0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, create_memory, {"name": "memory_caching", **options}, WIDTH, HEADS)


def test_a_memory_of_yours_below_answers_and_hears_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("unmixed")(Unmixed)
    assert snapshot_memories() == ["infini", "titans", "ttt", "unmixed"]
    assert isinstance(MemoryCaching(WIDTH, HEADS, over="unmixed").over, Unmixed)
    assert needs_whole_segments(MemoryCaching(WIDTH, HEADS, over={"name": "titans", "window": 2})) is not None
    refuses(r"read='soup'.*read='gated'", MemoryCaching, WIDTH, HEADS, over="unmixed", read="soup")
    memory: Any = create_memory(caching({"name": "titans", "preset": "long"}), WIDTH, HEADS, causal=False)
    assert memory.over.gates == "stretched" and memory.over.causal is False
