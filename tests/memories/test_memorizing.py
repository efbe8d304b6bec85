"""Memorizing Transformers: against loops, against recorded values, as what it becomes in limiting cases, and learning.

Legend: B rows, N tokens, M slots, K neighbours, H heads, E head width, D model width.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from memories.harness import HEADS, WIDTH, agree, inputs, layer_of, recorded, run_layer
from memories.learning import LATCH, untrained
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import state as states
from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.memory import LayerMemory, Query, Reading, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories import create_memory, memorizing
from cached_transformers.memories.memorizing import Found, Memorizing, NeighbourStore, nearest, unit
from cached_transformers.memories.parts import nearest as search
from cached_transformers.memories.parts.neighbour_index import Graph
from cached_transformers.positions import RotaryPositions

ROWS, HEAD = 2, 4


def twin(layer: SelfAttention, inputs: list[Tensor], paddings: list[Tensor]) -> list[Tensor]:
    """Outputs of the layer over segments, token by token."""
    memory: Memorizing = layer.memory  # type: ignore[assignment]
    stored = {(b, h): deque(maxlen=memory.length) for b in range(ROWS) for h in range(HEADS)}
    outs = []
    for x, padding in zip(inputs, paddings, strict=True):
        rows = []
        for b in range(ROWS):
            q, k, v = (layer.qkv(x[b])[:, i * WIDTH : (i + 1) * WIDTH].unflatten(-1, (HEADS, HEAD)) for i in range(3))
            tokens = []
            for i in range(x.shape[1]):
                heads = []
                for h in range(HEADS):
                    seen = [j for j in range(i + 1) if not padding[b, j]]
                    local = torch.stack([q[i, h] @ k[j, h] / math.sqrt(HEAD) for j in seen]) if seen else None
                    y = torch.zeros(HEAD) if local is None else local.softmax(0) @ torch.stack([v[j, h] for j in seen])
                    entries = stored[b, h]
                    if entries:
                        direction = q[i, h] / q[i, h].norm()
                        best = sorted(entries, key=lambda e: -float(direction.detach() @ e[0]))[: memory.k]
                        logits = memory.scale_H[h].abs() * torch.stack([direction @ e[0] for e in best])
                        found = logits.softmax(0) @ torch.stack([e[1] for e in best])
                        if "lse" not in memory.needs:
                            gate = memory.gate_H[h].sigmoid()
                            y = gate * found + (1 - gate) * y
                        elif local is None:
                            y = found
                        else:
                            weights = torch.cat([logits + memory.gate_H[h], local]).softmax(0)
                            y = weights @ torch.stack([*(e[1] for e in best), *(v[j, h] for j in seen)])
                    heads.append(y)
                tokens.append(torch.cat(heads))
            rows.append(layer.output(torch.stack(tokens)))
            for j in range(x.shape[1]):
                for h in range(HEADS):
                    if not padding[b, j]:
                        stored[b, h].append(((k[j, h] / k[j, h].norm()).detach(), v[j, h].detach()))
        outs.append(torch.stack(rows))
    return outs


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("times", [9, 0])  # one softmax over all of a small store, or neighbours gathered
def test_it_is_what_loops_compute(joint: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorizing, "ALL", times)
    layer = layer_of(Memorizing(WIDTH, HEADS, length=7, k=3, joint=joint))
    shapes = [5, 4, 9, 2, 5]  # 9 tokens into 7 slots; the ring turns several times
    given = [x.requires_grad_() for x in inputs(*shapes)]
    paddings = [torch.rand(ROWS, n) < 0.3 for n in shapes]
    results = (run_layer(layer, given, paddings)[0], twin(layer, given, paddings))
    got, want = ([y[~p] for y, p in zip(ys, paddings, strict=True)] for ys in results)
    leaves = {**dict(layer.named_parameters()), **{str(i): x for i, x in enumerate(given)}}
    agree(got, want, leaves, least=None)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.device
def test_recorded_attention_over_neighbours_and_its_mix(shared: Path) -> None:
    """Every query has its own four keys; here they are a row each."""
    golden = recorded(shared, "memories/memorizing", "ext/")
    keys, values, queries = (golden[n] for n in ("keys", "values", "queries"))
    rows = [t.transpose(2, 3).flatten(0, 1).transpose(1, 2) for t in (keys, values)]  # (B T, H, K, E)
    q = queries.flatten(0, 1)[:, :, None]
    memory = Memorizing(10, 2, length=4, k=4)
    with torch.no_grad():
        memory.scale_H.copy_(golden["scale_factor"])
        memory.gate_H.copy_(golden["bias"])
    reading = memory.read(NeighbourStore(*rows, torch.full((len(q),), 4)), Query(q.flatten(1)[:, None], q), None)
    assert reading.output_BHNE is not None
    close(reading.output_BHNE[:, :, 0].view(golden["out"].shape), golden["out"])
    local = golden["local"].flatten(0, 1)[:, :, None]
    mixed = memory.combine(local, Query(local), reading)
    close(mixed[:, :, 0].view(golden["out"].shape), golden["combined"])


@pytest.mark.device
def test_recorded_joint_attention(shared: Path) -> None:
    """Its local queries and keys are normalised too, and all heads share one key and value."""
    memory = Memorizing(8, 2, length=32, k=3, joint=True)
    golden = recorded(shared, "memories/memorizing", "joint/")
    scale_H = golden["param/scale"].flatten().exp()
    with torch.no_grad():
        memory.scale_H.copy_(scale_H)
    state = memory.init_state(2, torch.zeros(()))
    core = SoftmaxAttention()
    for segment in range(3):
        x = golden["x"][segment]
        q = unit(F.linear(x, golden["param/to_q.weight"]).unflatten(-1, (2, 4)).transpose(1, 2))
        k, v = (t[:, None].expand(-1, 2, -1, -1) for t in F.linear(x, golden["param/to_kv.weight"]).chunk(2, -1))
        scaled_q = q * scale_H[:, None, None] * 2  # the core divides by the root of the head width
        reading = memory.read(state, Query(x, q), None)
        own = core(scaled_q, unit(k), v, causal=True, want_lse=True)
        y = memory.combine(own.out_BHNV, Query(x, q), reading._replace(lse_BHN=own.lse_BHN))
        y = F.linear(y.transpose(1, 2).flatten(2), golden["param/to_out.weight"])
        close(y, golden[f"seg{segment}/out"])
        state, _ = memory.write(state, Trace(x, y, Query(x, q, k_BHNE=k, v_BHNE=v), Reading()))


def test_an_empty_store_is_left_out_or_read_as_zeros() -> None:
    x = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64)
    torch.manual_seed(1)
    plain = layer_of(LayerMemory())
    for empty, share in {"bypass": 1.0, "zero": 0.75}.items():
        memory = Memorizing(WIDTH, HEADS, length=4, empty=empty, initial_gate=-math.log(3))  # type: ignore[arg-type]
        layer = SelfAttention(WIDTH, HEADS, memory=memory.double(), causal=True).double()
        layer.load_state_dict(plain.state_dict(), strict=False)
        ((y,), *_) = run_layer(layer, [x])
        bias = layer.output.bias
        torch.testing.assert_close(y - bias, share * (plain(x).y_BND - bias), rtol=0, atol=1e-7)


@pytest.mark.parametrize("chunk", [48, 2**6, 2**9])
def test_a_store_that_is_read_in_chunks_has_the_same_neighbours(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By thresholds and as compilers want it; of whole numbers: products are exact, and often tied."""
    q, k = (torch.randint(-4, 5, (ROWS, HEADS, n, HEAD)).float() for n in (6, 700))
    drifting = k + torch.arange(700)[:, None] // 100  # the later the nearer
    monkeypatch.setattr(search, "CACHED", chunk * 6 * 4)
    for keys in (k, drifting, drifting.flip(2)):
        for filled in ([700, 699], [301, 3], [0, 17]):
            counts = torch.tensor(filled)
            for neighbours in (1, 5, 40):
                whole = nearest(q, keys, counts, neighbours)
                products = products_of(q, keys, whole)
                with monkeypatch.context() as patch:
                    patch.setattr(search, "SCORES", chunk * ROWS * HEADS * 6 * 4)
                    found = nearest(q, keys, counts, neighbours)
                pieces = search._by_chunks(q, keys, counts, neighbours, max(chunk, neighbours))
                for index in (found, pieces):
                    assert torch.equal(products_of(q, keys, index), products)
                    assert all(len(set(t)) == len(t) for t in (index[0, 0, 0].tolist(),) if -1 not in t)


def products_of(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """(B, H, N, K), -inf where there is no neighbour."""
    return (q @ k.mT).gather(-1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)


@pytest.mark.parametrize(("depth", "layer"), [(1, 1), (2, 2), (3, 3), (4, 3), (12, 9)])
def test_one_layer_has_the_store(depth: int, layer: int) -> None:
    made = [create_memory({"name": "memorizing"}, WIDTH, HEADS, depth=depth, index=i) for i in range(depth)]
    assert [m.here for m in made].index(True) + 1 == layer and sum(m.here for m in made) == 1  # type: ignore[union-attr]
    for memory in made:
        assert memory.needs == ({"state", "head"} if memory.here else set())  # type: ignore[union-attr]
        assert memory.here or (memory.init_state(1, torch.zeros(())) == () and not list(memory.parameters()))  # type: ignore[union-attr]


def test_faiss_and_cores_that_it_cannot_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    refuses(r"cached-transformers\[memory\]", Memorizing, WIDTH, HEADS, store="faiss", raises=ImportError)

    class Deaf(Attention):
        can = frozenset({"causal", "bidirectional"})

    with pytest.raises(ValueError, match=r"memory Memorizing needs lse .*, which attention Deaf does not give"):
        SelfAttention(WIDTH, HEADS, core=Deaf(), memory=Memorizing(WIDTH, HEADS, joint=True))
    SelfAttention(WIDTH, HEADS, core=Deaf(), memory=Memorizing(WIDTH, HEADS))
    refuses(r"needs lse \(.*\), which attention Deaf does not give", Deaf(), *torch.ones(3, 1, 1, 1, 1), want_lse=True)


def test_faiss_gives_what_exact_search_gives() -> None:
    """Whatever state is read: growing, at capacity, of another stream, reset, or by a copy of the model."""
    pytest.importorskip("faiss")
    spec = {"name": "memorizing", "length": 20, "k": 4, "initial_scale": 5.0}
    exact, indexed = untrained(LATCH, spec), untrained(LATCH, {**spec, "store": "faiss"})
    indexed.load_state_dict(exact.state_dict())
    twins = [copy.deepcopy(indexed), pickle.loads(pickle.dumps(indexed)), indexed]
    streams = torch.randint(0, 11, (2, 3, 48)).split(6, -1)  # two streams of three rows
    given = [exact.init_state(3), exact.init_state(3)]
    for step, segments in enumerate(streams):
        for stream in range(2):
            if step == 3 and stream == 1:
                given[1] = states.reset(given[1], exact.init_state(3), torch.tensor([False, True, False]))
            want = exact(segments[stream], given[stream])
            got = twins[step % 3](segments[stream], given[stream])
            torch.testing.assert_close(got.outputs, want.outputs, rtol=0, atol=1e-5)
            given[stream] = want.state
    indexed(streams[0][0], given[0]).outputs.square().mean().backward()
    assert indexed.stack.blocks[0].attention.memory.scale_H.grad.abs().min() > 0


def test_compiled_code_breaks_at_the_search_of_faiss_and_goes_on() -> None:
    pytest.importorskip("faiss")
    model = untrained(LATCH, {"name": "memorizing", "length": 20, "k": 4, "store": "faiss"}).eval()
    run = torch.compile(model, backend="eager", dynamic=False)
    state = model.init_state(2)
    with torch.no_grad():
        for segment in torch.randint(0, 11, (2, 24)).split(6, 1):
            want = model(segment, state)
            torch.testing.assert_close(run(segment, state).outputs, want.outputs, rtol=0, atol=1e-5)
            state = want.state


def recall(found: Tensor, true: Tensor) -> float:
    """Share of the true neighbours that are found."""
    return (true[..., None] == found[..., None, :]).any(-1).float().mean().item()


def count_added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys go into graphs, a number for each time."""
    added: list[int] = []
    grow = Graph.grow

    def counting(self: Graph, keys: Any, written: int) -> None:
        before = self.index.ntotal
        grow(self, keys, written)
        added.append(self.index.ntotal - before)

    monkeypatch.setattr(Graph, "grow", counting)
    return added


@pytest.mark.parametrize("in_place", [False, True])
def test_a_graph_grows_with_its_store_and_round_the_ring(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is added once, and 400 again whenever more than 500, the slots, are old: twice among 2000 tokens.
    A store that is known by its tensor is not compared."""
    pytest.importorskip("faiss")
    added = count_added(monkeypatch)
    memory = Memorizing(16, 1, length=500, k=8, store="faiss", faiss_index="HNSW16").eval()
    monkeypatch.setattr(*((np, "array_equal", None) if in_place else (memory.index, "knows", lambda k: False)))
    state = states.seal(memory.init_state(1, torch.zeros(())))
    shares = []
    with torch.no_grad():
        for _ in range(20):
            q, k, v = torch.randn(3, 1, 1, 100, 16)
            query = Query(q[:, 0], q, k_BHNE=k, v_BHNE=v)
            memory.read(state, query, None)
            if bool(state.written_B.any()):
                found = memory.index.search(unit(q), state.k_BHME, state.written_B, 8)
                shares.append(recall(found, nearest(unit(q), state.k_BHME, state.filled_B, 8)))
            with states.last_use(state if in_place else None):
                after, _ = memory.write(state, Trace(q[:, 0], q[:, 0], query, Reading()))
            assert (after.k_BHME is state.k_BHME) == in_place
            state = after
    assert min(shares) > 0.9
    assert sum(added) == 1900 + 2 * 400, "what the graph holds was added again"


def test_a_graph_of_another_stream_is_not_taken_for_that_of_this_one() -> None:
    """Also when its tensor is the same one, with other numbers in it."""
    pytest.importorskip("faiss")
    index = Memorizing(16, 1, store="faiss", faiss_index="HNSW16").index
    assert index is not None
    q, k, other = unit(torch.randn(3, 1, 1, 300, 16))
    count = torch.tensor([300])
    for keys in (k, other, k):
        assert recall(index.search(q, keys, count, 4), nearest(q, keys, count, 4)) > 0.9
    k.copy_(other)
    assert recall(index.search(q, k, count, 4), nearest(q, other, count, 4)) > 0.9
    assert recall(index.search(q, k, count - 200, 4), nearest(q, other, count - 200, 4)) > 0.9


def test_log_sum_exp_of_rotated_keys_reaches_the_memory() -> None:
    layer = layer_of(Memorizing(WIDTH, HEADS, length=8, joint=True), positions=RotaryPositions(HEAD))
    x, positions = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64), torch.arange(5)[None, :, None].expand(ROWS, -1, -1)
    attended = layer(x, positions, state=layer.memory.init_state(ROWS, x))
    q, k = (layer.positions.rotate(t, positions) for t in (attended.query.q_BHNE, attended.query.k_BHNE))  # type: ignore[arg-type]
    logits = (q @ k.mT / HEAD**0.5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(attended.reading.lse_BHN, logits.logsumexp(-1), rtol=0, atol=1e-10)
    assert isinstance(attended.reading.carry, Found)
