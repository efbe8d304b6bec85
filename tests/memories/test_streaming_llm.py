"""StreamingLLM: the official cache's recorded steps, a twin in loops, and decoders of transformers.

Legend: B rows, H heads, N tokens, M slots, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integrations.families import GROUPED, SEGMENT, decoder, words
from memories.harness import agree, sines
from memories.xl_family import joined, language_model, one_token, run, text
from torch import Tensor, nn

from cached_transformers import add_memory
from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.memories.streaming_llm import StreamingLLM
from cached_transformers.models.language_model import LanguageModel
from cached_transformers.positions import RotaryPositions

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
