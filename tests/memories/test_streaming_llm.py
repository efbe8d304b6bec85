"""StreamingLLM: the official cache's recorded steps, a twin in loops, decoders; sinks of other stores.

Legend: B rows, H heads, N tokens, M slots, E head width, V vocabulary,
D model width, P position channels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from integrations.families import GROUPED, SEGMENT, decoder, words
from memories.harness import HEADS, WIDTH, agree, inputs, layer_of, run_layer, sines
from memories.xl_family import joined, language_model, one_token, run, text
from torch import Tensor, nn

from cached_transformers import add_memory
from cached_transformers.interfaces.contexts import join
from cached_transformers.interfaces.incremental import open_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.memories import create_memory
from cached_transformers.memories.streaming_llm import StreamingLLM
from cached_transformers.models.language_model import LanguageModel
from cached_transformers.positions import Positions, RotaryPositions

S, R = 2, 4


def streaming(**options: Any) -> dict[str, Any]:
    return {"name": "streaming_llm", "length": R, "sinks": S, **options}


def with_halves_turned(t_BHNE: Tensor) -> Tensor:
    """Channels in the order in which our rotation pairs neighbours, where the source pairs i with i + E / 2."""
    return torch.stack(t_BHNE.chunk(2, -1), -1).flatten(-2)


def test_the_recorded_steps(shared: Path) -> None:
    golden = np.load(shared / "golden/recurrent/streaming_llm.npz", allow_pickle=False)
    q, k, v = (torch.tensor(golden[name]) for name in "qkv")
    heads, steps, width = k.shape[1:]
    # There the token itself is one of the recent ones.
    memory = StreamingLLM(heads * width, heads, int(golden["recent"]) - 1, sinks=int(golden["sink"]), keep="kv").eval()
    state, turn = memory.init_state(1, k), RotaryPositions(width).rotate
    for step in range(steps):
        here_B1P = torch.full((1, 1, 1), step)
        context = memory.open(state, here_B1P, lambda *_, **__: None)  # type: ignore[arg-type, return-value]
        own = (t[:, :, step : step + 1] for t in (k, v))
        keys, values = (torch.cat(pair, 2) for pair in zip((context.k_BHME, context.v_BHME), own, strict=True))
        valid_L = torch.cat([context.valid_BM[0], torch.ones(1, dtype=torch.bool)])
        kept = [int((k[0, 0] == key).all(-1).nonzero()) for key in keys[0, 0][valid_L]]
        assert kept == [place for place in golden["kept"][step].tolist() if place >= 0]
        places = torch.cat([context.positions_BMP, here_B1P], 1)
        asks, seen = with_halves_turned(q[:, :, step : step + 1]), with_halves_turned(keys)
        logits = turn(asks, here_B1P) @ turn(seen, places).mT / math.sqrt(width)
        found = logits.masked_fill(~valid_L, -math.inf).softmax(-1) @ values
        torch.testing.assert_close(
            found[0, :, 0], torch.tensor(golden["out"][0, :, step]), rtol=1e-6, atol=1e-6
        )  # our angles are float32
        x_B1D = torch.zeros(1, 1, heads * width)
        query = Query(x_B1D, None, here_B1P, None, None, k[:, :, step : step + 1], v[:, :, step : step + 1])
        state, _ = memory.write(state, Trace(x_B1D, x_B1D, query, Reading()))


def twin(model: LanguageModel, tokens: list[int], segment: int) -> Tensor:
    """(N, V): logits of one row, one token at a time, from lists of all that every layer was given."""
    blocks: list[Any] = list(model.stack.blocks)
    given: list[list[Tensor]] = [[] for _ in blocks]
    logits = []
    for first in range(0, len(tokens), segment):
        x = [model.embedding.weight[token] for token in tokens[first : first + segment]]
        for index, block in enumerate(blocks):
            slots = given[index][:S] + given[index][S:][-R:]
            known = [(hidden, (first - len(slots) + place,)) for place, hidden in enumerate(slots)]
            y = []
            for i, hidden in enumerate(x):
                known.append((hidden, (first + i,)))
                y.append(one_token(block, hidden, (first + i,), known, lambda a, b: sines(a[0] - b[0], 12)))
            given[index] += [hidden.detach() for hidden in x]
            x = y
        logits += [model.head(model.stack.norm(t)) for t in x]
    return torch.stack(logits)


@pytest.mark.parametrize("segment", [1, 3, 5, 8])
def test_the_twin(segment: int) -> None:
    model, tokens_BN = language_model(streaming()), text(2, 17)
    ours = joined(run(model, tokens_BN, segment))
    wanted = torch.stack([twin(model, row.tolist(), segment) for row in tokens_BN])
    agree([ours], [wanted], model, least=1e-6)


LLAMA = decoder("llama", "Llama", **GROUPED)


@torch.no_grad()
def test_a_pretrained_decoder_has_it_at_once_and_is_what_it_was_while_all_fits() -> None:
    plain, model = LLAMA.build(), LLAMA.with_memory(streaming(length=12))
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}
    ids = words(tokens=14)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for beams in (1, 3):
        said = [host.generate(words(tokens=5), num_beams=beams, **options)[:, :17] for host in (model, plain)]
        assert torch.equal(*said)
    long = torch.cat([words(tokens=14)] * 9, 1)
    assert model(long).logits.isfinite().all()


@pytest.mark.parametrize("name", ["streaming_llm", "transformer_xl"])
@torch.no_grad()
def test_a_decoder_goes_on_from_places_in_the_cache(name: str) -> None:
    """A twin: the last segment's logits are those of the host itself, reading sinks and recent tokens as one text.

    Of one layer, whose keys are of the tokens alone.
    """
    family = decoder("llama", "Llama", **GROUPED, num_hidden_layers=1)
    plain, model, ids = family.build(), family.with_memory({**streaming(), "name": name}), words(tokens=5 * SEGMENT)
    begin = 4 * SEGMENT
    cache = torch.cat([ids[:, :S], ids[:, begin - R :]], 1)
    torch.testing.assert_close(model(ids).logits[:, begin:], plain(cache).logits[:, S + R :], rtol=0, atol=1e-5)


def test_a_table_of_positions_is_refused_with_what_to_take() -> None:
    model: nn.Module = decoder("gpt2", "GPT-2").build()
    with pytest.raises(ValueError, match=r"its positions are a table .*take a decoder with rotary positions"):
        add_memory(model, streaming(), segment_length=SEGMENT)


SINKS = 3
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
        hidden_BMD = query.x_BND.new_zeros(rows, SINKS, WIDTH)
        places_BM1, valid_BM = torch.zeros(rows, SINKS, 1, dtype=torch.long), torch.zeros(rows, SINKS, dtype=torch.bool)
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
                if not padding_BN[row, place] and len(kept) < SINKS:
                    kept.append((trace.y_BND if self.outputs else trace.x_BND)[row, place].detach())
                    padding_BN[row, place] = True
        after, loss = self.inner.write(state[1], trace._replace(query=trace.query._replace(padding_BN=padding_BN)))
        return (lists, after), loss


PADDED = torch.tensor([[False, True, False, False], [True, True, True, False]])


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 2, 4, 5, 3), (4, 4, 4, 4), (9, 7)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_a_core_with_sinks_is_its_twin(name: str, padded: bool, lengths: tuple[int, ...]) -> None:
    found = []
    for memory in (made(name, SINKS), Apart(made(name, 0), name == "ernie_doc")):
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
