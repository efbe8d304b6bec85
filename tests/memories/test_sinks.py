"""Sinks beside a store: a twin that keeps them in lists, one token at a time, and the default of host decoders.

Legend: B rows, N tokens, M slots, D model width, P position channels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.families import GROUPED, decoder
from memories.harness import HEADS, WIDTH, inputs, layer_of, run_layer
from refusals import refuses
from torch import Tensor

from cached_transformers.interfaces.contexts import join
from cached_transformers.interfaces.incremental import open_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.memories import create_memory
from cached_transformers.positions import Positions

S = 3
STORES: dict[str, dict[str, Any]] = {
    "transformer_xl": {"length": 4},
    "ernie_doc": {"length": 4},
    "compressive": {"length": 3, "compressed": 2, "rate": 2},
    "infinity_former": {"length": 3, "chunk": 2, "basis": 4},
    "streaming_llm": {"length": 4},
}


def made(name: str, sinks: int) -> Any:
    torch.manual_seed(0)
    return create_memory({"name": name, "sinks": sinks, **STORES[name]}, WIDTH, HEADS)


class Apart(LayerMemory):
    """Any memory beside lists of each row's first tokens, which it never sees."""

    def __init__(self, inner: Any, outputs: bool) -> None:
        super().__init__()
        self.inner, self.outputs, self.needs = inner, outputs, inner.needs

    def position_scheme(self) -> Positions | None:
        return self.inner.position_scheme()  # type: ignore[no-any-return]

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        return [[] for _ in range(batch_size)], self.inner.init_state(batch_size, like)

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        return state[0], open_segment(self.inner, state[1], first_B1P, project_kv), first_B1P

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        lists, inner, first_B1P = opened
        reading = self.inner.read(inner, query, project_kv)
        rows = len(lists)
        hidden_BMD = query.x_BND.new_zeros(rows, S, WIDTH)
        places_BM1, valid_BM = torch.zeros(rows, S, 1, dtype=torch.long), torch.zeros(rows, S, dtype=torch.bool)
        for row, kept in enumerate(lists):
            oldest = int(first_B1P[row, 0, 0]) - int(reading.context.valid_BM[row].sum())
            for slot, hidden_D in enumerate(kept):
                hidden_BMD[row, slot], valid_BM[row, slot] = hidden_D, True
                places_BM1[row, slot] = oldest - len(kept) + slot
        assert project_kv is not None
        return reading._replace(context=join(reading.context, Context(*project_kv(hidden_BMD), places_BM1, valid_BM)))  # type: ignore[no-any-return]

    def project(self, *given: Any) -> Tensor:
        return self.inner.project(*given)  # type: ignore[no-any-return]

    def write(self, state: Any, trace: Trace) -> Any:
        lists, padding_BN = [list(kept) for kept in state[0]], trace.query.padding_BN
        padding_BN = torch.zeros(trace.x_BND.shape[:2], dtype=torch.bool) if padding_BN is None else padding_BN.clone()
        for row, kept in enumerate(lists):
            for place in range(padding_BN.shape[1]):
                if not padding_BN[row, place] and len(kept) < S:
                    kept.append((trace.y_BND if self.outputs else trace.x_BND)[row, place].detach())
                    padding_BN[row, place] = True
        after, loss = self.inner.write(state[1], trace._replace(query=trace.query._replace(padding_BN=padding_BN)))
        return (lists, after), loss


PADDED = torch.tensor([[False, True, False, False], [True, True, True, False]])


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 2, 4, 5, 3), (4, 4, 4, 4), (9, 7)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_the_twin(name: str, padded: bool, lengths: tuple[int, ...]) -> None:
    found = []
    for memory in (made(name, S), Apart(made(name, 0), name == "ernie_doc")):
        torch.manual_seed(1)
        layer, given = layer_of(memory), [x.requires_grad_() for x in inputs(*lengths)]
        masks = [PADDED[:, : x.shape[1]] if padded and 1 < x.shape[1] <= 4 else None for x in given]
        outs, _, loss = run_layer(layer, given, masks, counted=True)
        real = [y if mask is None else y[~mask] for y, mask in zip(outs, masks, strict=True)]
        (sum(y.square().sum() for y in real) + loss).backward()  # type: ignore[union-attr]
        found.append([*real, *(p.grad for p in (*layer.parameters(), *given))])
    assert len(found[0]) == len(found[1])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STORES)
def test_decoders_keep_sinks_unless_told(name: str) -> None:
    """Models of this package keep none; `same_length` is a window that hides them."""
    family, memory = decoder("llama", "Llama", **GROUPED), {"name": name, **STORES[name]}
    memory |= {"compressive": {"function": "mean"}, "infinity_former": {"kl_weight": 0}}.get(name, {})
    assert create_memory(memory, WIDTH, HEADS).sinks == (4 if name == "streaming_llm" else 0)
    for options, sinks in (({}, 4), ({"sinks": 0}, 0)):
        layers = family.with_memory({**memory, **options}).model.layers
        assert [layer.self_attn.memory.sinks for layer in layers] == [sinks] * len(layers)
    if name == "transformer_xl":
        assert family.with_memory({**memory, "same_length": True}).model.layers[0].self_attn.memory.sinks == 0
        refuses(r"sinks=2.*same_length=True", create_memory, {**memory, "same_length": True, "sinks": 2}, WIDTH, HEADS)
    refuses("sinks=-1", create_memory, {**memory, "sinks": -1}, WIDTH, HEADS)
