"""Memories that choose slots by a score, beside recorded scores, kept sets and outputs.

Legend: B rows, H heads, G heads of keys, N tokens, W queries, M slots, L slots and tokens, T tokens of a stream,
E head width.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from memories.scored_streams import Golden, close, golden, steps
from torch import Tensor

from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.memories.expected_attention import ExpectedAttention
from cached_transformers.memories.h2o import H2O
from cached_transformers.memories.keydiff import KeyDiff
from cached_transformers.memories.knorm import Knorm
from cached_transformers.memories.lagkv import WAITS, LagKV
from cached_transformers.memories.parts.scored_cache import Candidates, ScoredCache, pyramid
from cached_transformers.memories.snapkv import SnapKV
from cached_transformers.memories.tova import TOVA


def scores_of(memory: ScoredCache, data: Golden, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """(B, G, T) of one segment of all tokens."""
    seen: list[Tensor] = []
    score = type(memory).score

    def spy(self: Any, found: Candidates, carried: Any) -> Tensor:
        seen.append(score(self, found, carried))
        return seen[-1]

    monkeypatch.setattr(type(memory), "score", spy)
    steps(memory, data, data["k"].shape[2])
    monkeypatch.undo()
    return seen[0][..., -data["k"].shape[2] :]


WIDTH, HEADS = 48, 6
PLAIN: dict[str, Any] = {"sinks": 0, "relative": False}
STREAMS: dict[str, Any] = {
    "snapkv": lambda m, w, heavy: SnapKV(WIDTH, HEADS, m, observe=w, **PLAIN),
    "snapkv_unpooled": lambda m, w, heavy: SnapKV(WIDTH, HEADS, m, observe=w, kernel=1, **PLAIN),
    "tova": lambda m, w, heavy: TOVA(WIDTH, HEADS, m, keep="kv", relative=False).eval(),
    "h2o": lambda m, w, heavy: H2O(WIDTH, HEADS, m - heavy, heavy=heavy, relative=False),
    "keydiff": lambda m, w, heavy: KeyDiff(WIDTH, HEADS, m, observe=w, **PLAIN),
    "keydiff_rotated": lambda m, w, heavy: KeyDiff(WIDTH, HEADS, m, observe=w, rotated=True, **PLAIN),
    "knorm": lambda m, w, heavy: Knorm(WIDTH, HEADS, m, observe=w, **PLAIN),
}


@pytest.mark.parametrize("places", ["cache", "stream"])
@pytest.mark.parametrize("rule", STREAMS)
def test_the_recorded_streams(shared: Path, rule: str, places: str) -> None:
    if (rule, places) == ("keydiff_rotated", "stream"):
        pytest.skip("heads have other tokens, whose places in the stream one position for all heads cannot say")
    data = golden(shared, "stream")
    memory = STREAMS[rule](int(data["slots"]), int(data["observe"]), int(data["heavy"]))
    for number, step in enumerate(steps(memory, data, int(data["segment"]), places)):
        first, n = number * int(data["segment"]), step.out.shape[2]
        assert torch.equal(step.kept, data[f"{places}/{rule}/kept"][:, :, number])
        close(step.out, data[f"{places}/{rule}/out"][:, :, first : first + n])
        if rule == "h2o":
            close(step.state.scores_BGM, data[f"{places}/h2o/scores"][:, :, number])


@pytest.mark.parametrize("kernel", [1, 5, 7])
def test_the_recorded_scores_of_snapkv(shared: Path, kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = golden(shared, "snapkv")
    window, keep = int(data["window"]), int(data["keep"])
    memory = SnapKV(WIDTH, HEADS, keep, observe=window, kernel=kernel, **PLAIN)
    close(scores_of(memory, data, monkeypatch)[..., :-window], data[f"kernel{kernel}/scores"][..., :-window])
    assert torch.equal(steps(memory, data, 40)[0].kept, data[f"kernel{kernel}/kept"].sort(-1).values)


@pytest.mark.parametrize("rule", ["keydiff", "knorm"])
@pytest.mark.parametrize("kind", ["rotated", "unrotated"])
def test_the_recorded_scores_of_keys(shared: Path, rule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = golden(shared, "keys_alone")
    options = {"observe": 0, **PLAIN}
    memory: Any = Knorm(WIDTH, HEADS, int(data["keep"]), **options)
    if rule == "keydiff":
        memory = KeyDiff(WIDTH, HEADS, int(data["keep"]), rotated=kind == "rotated", **options)
    close(scores_of(memory, data, monkeypatch), data[f"{rule}/{kind}/scores"])
    assert torch.equal(steps(memory, data, 40)[0].kept, data[f"{rule}/{kind}/kept"].sort(-1).values)


def test_keydiff_by_segments_is_that_by_blocks(shared: Path) -> None:
    """The release fills its cache before it begins with blocks, so that the first tokens are one segment here."""
    data = golden(shared, "keys_alone")
    keep, block = int(data["keep"]), int(data["block_keydiff/block"])
    assert keep % block == 0
    data |= {"k": data["k_rot"]}
    found = steps(KeyDiff(WIDTH, HEADS, keep, observe=0, **PLAIN), data, block)
    assert torch.equal(found[-1].kept, data["block_keydiff/kept"].sort(-1).values)


@pytest.mark.parametrize("variant", ["default", "epsilon", "mean_only", "no_value_norm"])
def test_the_recorded_scores_of_expected_attention(shared: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = golden(shared, "expected_attention")
    sinks, keep = int(data["n_sink"]), data[f"{variant}/kept"].shape[-1]
    options: dict[str, Any] = {
        "epsilon": {"epsilon": 1e-2},
        "mean_only": {"covariance": False},
        "no_value_norm": {"value_norm": False},
    }.get(variant, {})
    memory = ExpectedAttention(WIDTH, HEADS, keep, future=int(data["n_future"]), sinks=sinks, observe=0, **options)
    close(scores_of(memory, data, monkeypatch)[..., sinks:], data[f"{variant}/scores"][..., sinks:])
    step = steps(memory, data, 40)[0]
    assert torch.equal(step.kept, data[f"{variant}/kept"].sort(-1).values)
    seen_B, sum_BHE, outer_BHEE = step.state.carried
    n_B1 = (seen_B - sinks)[:, None]
    mean = sum_BHE / n_B1[..., None]
    close(mean, data["mean_unrotated"])
    close(
        outer_BHEE / (seen_B - sinks)[:, None, None, None] - mean[..., None] * mean[..., None, :],
        data["covariance_unrotated"],
    )


@pytest.mark.parametrize("cross", [False, True])
def test_the_recorded_scores_of_lagkv(shared: Path, cross: bool) -> None:
    """The sinks, then segments of the recorded length; what waits at the end is not scored yet."""
    data = golden(shared, "keys_alone")
    lag, sinks, tokens = int(data["lagkv/lag"]), int(data["lagkv/n_sink"]), data["k"].shape[2]
    wanted = data[f"lagkv/cross{int(cross)}/scores"]
    data |= {"k": data["k_rot"]}
    memory = LagKV(WIDTH, HEADS, tokens, cross=cross, observe=0, **PLAIN)
    memory.key_shape = (2, 8)
    state = memory.init_state(2, data["k"])
    bounds = [0, sinks, *range(sinks + lag, tokens + 1, lag)]
    for first, end in pairwise(bounds):
        x, positions = torch.zeros(2, end - first, WIDTH), torch.arange(first, end)[None, :, None].expand(2, -1, -1)
        k, v = (data[name][:, :, first:end].repeat_interleave(3, 1) for name in "kv")
        state, _ = memory.write(state, Trace(x, x, Query(x, None, positions, None, None, k, v), Reading()))
    scored = slice(sinks, bounds[-2])
    held = state.scores_BGM[..., -bounds[-1] :]
    close(held[..., scored], wanted[..., scored])
    assert (held[..., bounds[-2] :] == WAITS).all() and (wanted[..., bounds[-2] :] == 1).all()


def test_the_recorded_sums_of_grouped_attention(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text at once; TOVA per group is SnapKV of one query."""
    data = golden(shared, "grouped_attention")
    keep, recent = int(data["keep"]), int(data["recent"])
    h2o = H2O(WIDTH, HEADS, recent, heavy=keep - recent, relative=False)
    close(scores_of(h2o, data, monkeypatch), data["h2o/mean"])
    assert torch.equal(steps(h2o, data, 40)[0].kept, data["h2o/mean_kept"].sort(-1).values)
    last = SnapKV(WIDTH, HEADS, keep, observe=1, kernel=1, **PLAIN)
    close(scores_of(last, data, monkeypatch)[..., :-1], data["tova_per_group/mean"][..., :-1])
    tova = TOVA(WIDTH, HEADS, keep, keep="kv", relative=False).eval()
    wanted = data["attention"][:, :, -1].mean(1).topk(keep).indices.sort(-1).values
    assert torch.equal(steps(tova, data, 40)[0].kept, wanted[:, None].expand(-1, 2, -1))


def test_the_recorded_budgets_of_the_pyramid(shared: Path) -> None:
    """Those that neither the length of the text nor its window limits."""
    data, compared = golden(shared, "budgets"), 0
    for (layers, length, ratio, window, beta), wanted in zip(
        data["pyramid/cases"].tolist(), data["pyramid/budgets"].tolist(), strict=True
    ):
        slots, depth = length * (1 - ratio), int(layers)
        if slots / beta >= window and 2 * slots - slots / beta < length - window:
            assert [pyramid(slots, index, depth, beta) for index in range(depth)] == wanted[:depth]
            compared += 1
    assert compared >= 10
    assert sum(pyramid(64, index, 8, 4) for index in range(8)) == 8 * 64
