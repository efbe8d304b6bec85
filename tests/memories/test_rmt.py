"""RMT: a slow twin, golden values, and the memory of a bidirectional model.

Legend: B rows, N tokens, M memory tokens, H heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories import harness
from memories.harness import WIDTH, agree, attended, build, recorded, run, segments, sines
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Context, Entry, ProjectKV, Query, Reading
from cached_transformers.memories.parts.memory_tokens import visible_round
from cached_transformers.memories.rmt import RMT
from cached_transformers.memories.transformer_xl import CacheBeforeTokens
from cached_transformers.positions import RelativePositions

M, ROWS = 3, 2


def rmt(**options: Any) -> dict[str, Any]:
    return {"name": "rmt", "length": M, **options}


def tokens(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    return segments(count, ROWS, seed=seed)


def twin_sees(row: int, key: int, n: int, mask: str, front: int) -> bool:
    """The table of the paper for places in [read, segment, write]."""
    kinds = ["read" if place < front else "segment" if place < front + n else "write" for place in (row, key)]
    if kinds[0] == kinds[1]:
        return key <= row if kinds[0] == "segment" or mask == "causal" else True
    return ("read", "segment", "write").index(kinds[1]) < ("read", "segment", "write").index(kinds[0])


def twin(
    model: nn.Module,
    segments: Sequence[Tensor],
    *,
    mask: str,
    cache: int = 0,
    read_cache: bool = False,
    slots: int = 0,
    initial_carry: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and last memory of a pre-norm model with relative positions, in loops over rows, heads and places."""
    stack, spanning = model.stack, model.stack.model_memory  # type: ignore[union-attr]
    logits, memories = [], []
    for b in range(ROWS):
        memory, past, front = spanning.initial_MD, [], 2 * M if slots else M  # type: ignore[union-attr]
        cached: list[list[tuple[int, Tensor]]] = [[] for _ in stack.blocks]  # type: ignore[union-attr, arg-type]
        seen = 0
        for segment in segments:
            n = segment.shape[1]
            found = twin_retrieval(spanning.retrieval, past[-slots:]) if past else memory  # type: ignore[union-attr]
            x = [*memory, *(found if slots else ()), *model.embedding(segment[b]), *memory]  # type: ignore[operator]
            places = list(range(seen - front, seen + n + M))
            for index, block in enumerate(stack.blocks):  # type: ignore[union-attr, arg-type]
                stored = [(place - front, h.detach()) for place, h in cached[index]]
                cached[index] = (
                    (cached[index] + list(zip(places, x, strict=True))[front : front + n])[-cache:] if cache else []
                )
                x = twin_block(block, x, places, stored, n, mask, read_cache, front)
            memory = torch.stack([spanning.norm(t) for t in x[front + n :]])  # type: ignore[union-attr, operator]
            if initial_carry is not None:
                pairs = zip(spanning.initial_MD, spanning.carry_M, memory, strict=True)  # type: ignore[union-attr, arg-type]
                memory = torch.stack(
                    [a + g * a.square().sum().sqrt() * y / y.square().sum().sqrt() for a, g, y in pairs]
                )
            past = [*past, memory] if slots else []
            logits.append(torch.stack([model.head(stack.norm(t)) for t in x[front : front + n]]))  # type: ignore[operator, union-attr]
            seen += n
        memories.append(torch.cat(past[-slots:]) if slots else memory)
    per_row = len(segments)
    whole = [torch.cat(logits[b * per_row : (b + 1) * per_row]) for b in range(ROWS)]
    return torch.stack(whole), torch.stack(memories)


def twin_retrieval(module: Any, past: list[Tensor]) -> list[Tensor]:
    """What each token of the last memory finds, one after the other."""
    found = []
    for m in past[-1]:
        keys = [module.past_norm(t) for memory in past for t in memory]
        query = module.query(module.query_norm(m))
        weights = torch.stack([query @ module.key(t) / len(m) ** 0.5 for t in keys]).softmax(0)
        u = m + module.output(sum(w * module.value(t) for w, t in zip(weights, keys, strict=True)))
        found.append(u + module.mlp(module.norm(u)))
    return found


def twin_block(
    block: Any,
    x: list[Tensor],
    places: list[int],
    stored: list[tuple[int, Tensor]],
    n: int,
    mask: str,
    reads: bool,
    front: int,
) -> list[Tensor]:
    result = []
    for i, t in enumerate(x):
        seen = list(stored) if front <= i < front + n or reads else []
        seen += [(places[j], x[j]) for j in range(len(x)) if twin_sees(i, j, n, mask, front)]
        codes = [sines(places[i] - place, WIDTH) for place, _ in seen]
        y = t + attended(block.attention, t, [h for _, h in seen], codes)
        result.append(y + block.feed_forward(y))
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "full"},
        {"mask": "causal"},
        {"mask": "full", "cache": 4},
        {"mask": "causal", "cache": 7},
        {"mask": "full", "cache": 7, "read_cache": True},
        {"mask": "causal", "cache": 4, "read_cache": True},
        {"mask": "full", "slots": 2},
        {"mask": "causal", "slots": 3, "cache": 4},
        {"mask": "full", "initial_carry": 0.7},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_a_slow_twin(options: dict[str, Any]) -> None:
    model = build(rmt(**options), scale=0.2, positions="relative")
    given = [*tokens(3 if options.get("slots") == 2 else 2), tokens(1, seed=1)[0][:, :3]]
    outs = run(model, given)
    got = torch.cat([out.outputs for out in outs], 1), outs[-1].state.model.tokens_BMD
    agree(got, twin(model, given, **options), model, grads=1e-9)


def test_golden_retrieval(shared: Path) -> None:
    """Earlier memories as the state holds them, with empty slots before them; a first segment retrieves nothing."""
    values = recorded(shared, "2026/rmt_r")
    memory = RMT(6, 1, 3, slots=4).double()
    module: Any = memory.retrieval
    module.mlp[0], module.mlp[2] = nn.Linear(6, 10).double(), nn.Linear(10, 6).double()
    names = {
        **{"query": "q", "key": "k", "value": "v", "output": "o", "mlp.0": "fc1", "mlp.2": "fc2"},
        **{"query_norm": "ln_q", "past_norm": "ln_kv", "norm": "ln_mlp"},
    }
    for ours, theirs in names.items():
        part = module.get_submodule(ours)
        weight = values.get(f"param/{theirs}", values.get(f"param/{theirs}_weight"))
        part.load_state_dict({"weight": weight, "bias": values[f"param/{theirs}_bias"]}, strict=part is not module.key)
    state = memory.init_state(2, values["memories"])
    empty = memory.open(state, None, ())  # type: ignore[arg-type]
    assert torch.equal(empty, memory.initial_MD.expand(2, -1, -1).repeat(1, 2, 1))
    nothing = torch.full_like(state.tokens_BMD, torch.nan)
    for index, (m, want) in enumerate(zip(values["memories"], values["retrieved"], strict=True)):
        held = torch.cat([nothing, *values["memories"][: index + 1]], 1)[:, -12:]
        state = state._replace(tokens_BMD=held, segments_B=torch.full((2,), index + 1))
        opened = memory.open(state, None, ())  # type: ignore[arg-type]
        assert torch.equal(opened[:, :3], m)
        torch.testing.assert_close(opened[:, 3:], want, rtol=0, atol=1e-10)


def test_retrieval_begins_as_the_memory_itself_and_keeps_the_last_memories() -> None:
    model = build(rmt(slots=2), scale=0.0)
    outs = run(model, tokens(4))
    written = []
    for out in outs:
        state = out.state.model
        opened = model.stack.model_memory.open(state, None, ())
        assert torch.equal(opened[:, :M], opened[:, M:]) and torch.equal(opened[:, :M], state.tokens_BMD[:, M:])
        written.append(opened[:, :M])
    assert torch.equal(outs[-1].state.model.tokens_BMD, torch.cat(written[-2:], 1))
    for _ in range(2):  # of zeros, only the last maps learn in the first step
        model.zero_grad()
        run(model, tokens(4))[-1].outputs.square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(p.grad.abs().max() > 0 for p in model.stack.model_memory.retrieval.parameters())


def golden_model(weights: dict[str, Tensor], memory: Any) -> nn.Module:
    """Our model with the weights of the reference's: two post-norm layers, 2 heads of 4."""
    model = build(
        memory, norm="post", activation="relu", positions="relative", bias=False, scale_embedding=True, tied=False
    )
    ours = {
        "embedding.weight": weights["word_emb.emb_layers.0.weight"],
        "head.weight": torch.zeros(harness.VOCABULARY, WIDTH),
    }
    if memory is not None and "mem_tokens" in weights and memory["name"] == "rmt":
        ours["stack.model_memory.initial_MD"] = weights["mem_tokens"][:, 0]
    pairs = {
        "attention.qkv": "dec_attn.qkv_net",
        "attention.output": "dec_attn.o_net",
        "attention.positions.project": "dec_attn.r_net",
        "attention_norm": "dec_attn.layer_norm",
        "feed_forward.enter": "pos_ff.CoreNet.0",
        "feed_forward.leave": "pos_ff.CoreNet.3",
        "feed_forward_norm": "pos_ff.layer_norm",
    }
    for layer in range(2):
        for mine, theirs in pairs.items():
            for kind in ("weight", "bias"):
                if f"layers.{layer}.{theirs}.{kind}" in weights:
                    ours[f"stack.blocks.{layer}.{mine}.{kind}"] = weights[f"layers.{layer}.{theirs}.{kind}"]
        ours[f"stack.blocks.{layer}.attention.positions.content_bias"] = weights["r_w_bias"]
        ours[f"stack.blocks.{layer}.attention.positions.position_bias"] = weights["r_r_bias"]
    model.load_state_dict(ours)
    return model.eval()


def doubled(shared: Path, tag: str) -> dict[str, Tensor]:
    return {name: t.double() for name, t in recorded(shared, "memories/rmt_txl", f"{tag}/param/").items()}


@torch.no_grad()
def compare(model: nn.Module, ids: np.ndarray, want: Any, tag: str, tolerance: float, levels: bool = False) -> None:
    """Every row of the last layer (memory included), the memory and the caches, over four segments."""
    last: list[Tensor] = []
    model.stack.blocks[-1].register_forward_hook(lambda _m, _i, out: last.append(out[0]))  # type: ignore[index, union-attr, operator]
    for index, out in enumerate(run(model, torch.tensor(ids).T.split(6, 1))):
        names = {"hidden_full": last[index].transpose(0, 1)}
        if f"{tag}/seg{index}/mem_write" in want.files:
            names["mem_write"] = out.state.model.tokens_BMD.transpose(0, 1)
        if levels:
            names |= {f"xlcache{i}": s.hidden_BMD.transpose(0, 1) for i, s in enumerate(out.state.layers)}
        for name, got in names.items():
            expected = torch.tensor(want[f"{tag}/seg{index}/{name}"]).double()
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.device
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("cache", [0, 5])
def test_golden_clean_positions(shared: Path, mask: str, cache: int) -> None:
    """The paper's equations with signed distances, and a cache that holds the segment's tokens alone."""
    weights = np.load(shared / "golden/memories/rmt_txl.npz")
    want = np.load(shared / "golden/memories/spec_rmt_clean.npz")
    tag, source = ("full_signed" if mask == "full" else mask), "rmt_xl_noread" if cache else "rmt"
    model = golden_model(doubled(shared, source), rmt(mask=mask, cache=cache))
    tag = f"{tag}_xl5_stripped" if cache else tag
    compare(model, weights[f"{source}/x"], want, tag, 1e-6)  # their frequencies are float32
    if not cache:
        sees = visible_round(3, 6, 3, torch.device("cpu")) if mask == "full" else torch.ones(12, 12).tril().bool()
        assert np.array_equal(want[f"{tag}/seg0/allow"], sees.cpu().numpy())


@pytest.mark.device
@pytest.mark.parametrize("tag", ["plain", "xl_only"])
def test_golden_without_memory_tokens(shared: Path, tag: str) -> None:
    file = np.load(shared / "golden/memories/rmt_txl.npz")
    memory = {"name": "transformer_xl", "length": 5} if tag == "xl_only" else None
    compare(golden_model(doubled(shared, tag), memory), file[f"{tag}/x"], file, tag, 5e-6, levels=tag == "xl_only")


class WrappedPositions(RelativePositions):
    """The released code's shift, which is right for keys up to the query and takes the next row's terms beyond."""

    def bias(self, q: Tensor, q_positions: Tensor, k_positions: Tensor, *, causal_run: bool = False) -> Tensor:
        n = q.shape[2]
        if q_positions.min() < 0:  # the first segment: no cache yet, and so no keys of one
            own = super().bias(q, q_positions, k_positions[:, -n:], causal_run=True)
            return F.pad(own, (k_positions.shape[1] - n, 0))
        return super().bias(q, q_positions, k_positions, causal_run=True)


class HiddenCache(CacheBeforeTokens):
    """Hides its slots from the memory's tokens, whose place nobody tells it."""

    def read(self, opened: Context, query: Query, project_kv: ProjectKV | None) -> Reading:
        tokens = query.x_BND.shape[1] - 2 * self.front
        return super().read(opened, query._replace(segment=(self.front, tokens)), project_kv)


class CachedMemory(RMT):
    """The released code's cache, which takes the memory's tokens too."""

    def enter(self, *arguments: Any) -> Entry:
        return super().enter(*arguments)._replace(segment=None)


@pytest.mark.device
@pytest.mark.parametrize(
    ("tag", "options"),
    [("rmt", {}), ("rmt_xl_noread", {"cache": 5}), ("rmt_xl_read", {"cache": 5, "read_cache": True})],
)
def test_golden_released_code(shared: Path, tag: str, options: dict[str, Any]) -> None:
    """With the released code's shift and cache put in from here, our model gives its numbers."""
    file = np.load(shared / "golden/memories/rmt_txl.npz")
    model = golden_model(doubled(shared, tag), rmt(**options))
    model.stack.model_memory.__class__ = CachedMemory  # type: ignore[union-attr, assignment]
    for block in model.stack.blocks:  # type: ignore[union-attr]
        block.attention.positions.__class__ = WrappedPositions  # type: ignore[union-attr, assignment]
        if isinstance(block.attention.memory, CacheBeforeTokens) and not options.get("read_cache"):  # type: ignore[union-attr]
            block.attention.memory.__class__ = HiddenCache  # type: ignore[union-attr, assignment]
    compare(model, file[f"{tag}/x"], file, tag, 5e-6, levels=bool(options))


@pytest.mark.parametrize("options", [{}, {"cache": 4}, {"cache": 4, "read_cache": True}, {"slots": 2}], ids=str)
def test_in_a_bidirectional_model_the_memory_is_in_front_only_and_carried(options: dict[str, Any]) -> None:
    made: dict[str, Any] = {"classes": 3, "max_length": 8, "positions": "rotary"}
    model = build(rmt(**options), model="sequence_classifier", **made)
    lengths: list[int] = []
    model.stack.blocks[0].register_forward_pre_hook(lambda _m, given: lengths.append(given[0].shape[1]))  # type: ignore[index, union-attr, operator]
    first, second = tokens(2)
    state = model(first).state
    assert lengths == [(2 * M if "slots" in options else M) + 1 + harness.SEGMENT]
    told = model(second, state).outputs
    other = model(second, model(first.flip(0)).state).outputs
    assert (told - other).abs().max() > 1e-4
    filler, padding = F.pad(first, (0, 2)), F.pad(torch.zeros_like(first, dtype=torch.bool), (0, 2), value=True)
    padded = model(filler, padding=padding)
    torch.testing.assert_close(padded.outputs, model(first).outputs, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.state.model.tokens_BMD, state.model.tokens_BMD, rtol=0, atol=1e-5)
