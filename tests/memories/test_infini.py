"""Infini-attention: a slow twin, cuts, repeated pairs, strange keys, and hosts.

Legend: B rows, N tokens, H heads, E head width (F a second one), D = H E.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import BART, BERT, DECODERS, T5, Architecture, architectures, words
from memories.harness import HEADS, WIDTH, agree, inputs, layer_of, recorded, run_layer
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.attentions.parts.linearised import elu_features
from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.infini import Infini, recall, store
from cached_transformers.memories.parts import recurrent

ROWS, E = 2, 4
updates = pytest.mark.parametrize("update", ["linear", "delta", "exact"])


def features(t_E: Tensor) -> Tensor:
    return torch.stack([c + 1 if c > 0 else c.exp() for c in t_E])


class Head:
    """M and z of one head and row, one token after the other."""

    def __init__(self) -> None:
        self.M, self.z = torch.zeros(E, E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
        self.tokens = 0

    def answer(self, asked_E: Tensor, gated: bool = False) -> Tensor:
        if not self.tokens:
            return torch.zeros(E, dtype=torch.float64)
        if gated:
            return asked_E / torch.sqrt(asked_E @ asked_E + 1e-6) @ self.M
        s_E = features(asked_E)
        return torch.stack([sum(s_E[i] * self.M[i, j] for i in range(E)) for j in range(E)]) / (s_E @ self.z)

    def correct(self, k_E: Tensor, v_E: Tensor, beta: Tensor, g_E: Tensor) -> None:
        k_E = k_E / torch.sqrt(k_E @ k_E + 1e-6)
        self.M = g_E.exp()[:, None] * self.M
        self.M, self.tokens = self.M + beta * torch.outer(k_E, v_E - k_E @ self.M), self.tokens + 1

    def write(self, keys: list[Tensor], values: list[Tensor], update: str) -> None:
        old = [self.answer(k) for k in keys]
        for k, v, was in zip(keys, values, old, strict=True):
            news = {
                "linear": lambda v=v: v,
                "delta": lambda v=v, w=was: v - w,
                "exact": lambda v=v, k=k: v - self.answer(k),
            }
            s_E, u = features(k), news[update]()
            self.M, self.z, self.tokens = self.M + torch.outer(s_E, u), self.z + s_E, self.tokens + 1


def twin(layer: SelfAttention, inputs: list[Tensor], paddings: list[Tensor], update: str, first: str) -> list[Tensor]:
    """The layer row by row, head by head and token by token."""
    memory: Any = layer.memory
    heads = [[Head() for _ in range(HEADS)] for _ in range(ROWS)]
    outs = []
    for x, padding in zip(inputs, paddings, strict=True):
        rows = []
        for b in range(ROWS):
            q, k, v = (layer.qkv(x[b])[:, i * WIDTH : (i + 1) * WIDTH].unflatten(-1, (HEADS, E)) for i in range(3))
            tokens = []
            for n in range(x.shape[1]):
                seen = [j for j in range(n + 1) if not padding[b, j]]
                mixed = []
                for h in range(HEADS):
                    y = torch.zeros(E, dtype=torch.float64)
                    if seen:
                        weights = torch.stack([q[n, h] @ k[j, h] / math.sqrt(E) for j in seen]).softmax(0)
                        y = weights @ torch.stack([v[j, h] for j in seen])
                    if heads[b][h].tokens or first == "gated":
                        g = memory.gate_H[h].sigmoid()
                        y = g * heads[b][h].answer(q[n, h], update == "gated_delta") + (1 - g) * y
                    mixed.append(y)
                tokens.append(layer.output(torch.cat(mixed)))
            for h in range(HEADS):
                real = [j for j in range(x.shape[1]) if not padding[b, j]]
                if update == "gated_delta":
                    for j in real:
                        g_G = torch.zeros(1).double() if memory.decay is None else memory.decay(x)[0][b, h, j]
                        beta = memory.share(x[b, j])[h].sigmoid()
                        heads[b][h].correct(k[j, h], v[j, h], beta, g_G.expand(E))
                    continue
                heads[b][h].write([k[j, h] for j in real], [v[j, h] for j in real], update)
            rows.append(torch.stack(tokens))
        outs.append(torch.stack(rows))
    return outs


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"update": update, "first": first}
            for update in ("linear", "delta", "exact")
            for first in ("bypass", "gated")
        ),
        *({"update": "gated_delta", "decay": decay} for decay in ("none", "scalar", "channel")),
    ],
    ids=str,
)
def test_it_is_its_slow_twin_with_gradients(options: dict[str, Any]) -> None:
    update, first = options["update"], options.get("first", "bypass")
    layer = layer_of(Infini(WIDTH, HEADS, **options, initial_gate=0.4), 0.7)
    paddings = [torch.zeros(ROWS, n, dtype=torch.bool) for n in (5, 3, 4, 5)]
    paddings[0][1] = True  # this row's memory is empty for one segment more
    paddings[1][0, 0] = paddings[2][0, 2:] = paddings[2][1, 1] = True
    leaves = [x.requires_grad_() for x in inputs(5, 3, 4, 5)]
    sides = run_layer(layer, leaves, paddings)[0], twin(layer, leaves, paddings, update, first)
    got, want = ([y[~p] for y, p in zip(ys, paddings, strict=True)] for ys in sides)
    named = {**dict(layer.named_parameters()), **{f"x{i}": x for i, x in enumerate(leaves)}}
    gradients = agree(got, want, named, grads=1e-9, rtol=1e-7, least=1e-5)
    assert gradients["x0"][1].abs().max() == 0  # a row of padding


def written(memory: Infini, k: Tensor, v: Tensor, x: Tensor, state: Any, lengths: list[int]) -> Any:
    """The state after segments of these lengths."""
    for k_part, v_part, x_part in zip(k.split(lengths, 2), v.split(lengths, 2), x.split(lengths, 1), strict=True):
        query = Query(x_part, k_part, k_BHNE=k_part, v_BHNE=v_part)
        reading = memory.read(memory.open(state, None, None), query, None)
        state, _ = memory.write(state, Trace(x_part, x_part, query, reading))
    return state


@pytest.mark.parametrize("kind", ["gdn2", "kda"])
def test_recorded_states_of_the_gated_rule_however_a_stream_is_cut(
    shared: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer's input holds logits of beta, and the numbers whose softplus is -g; keys have length 1 already."""
    monkeypatch.setattr(recurrent, "unit", lambda t: t)
    folder = "2026/gdn2_layer" if kind == "gdn2" else "recurrent/kda"
    values = recorded(shared, folder)
    k, v, start = values["k"], values["v"], values["state0"]
    beta, g = (values[f"limit/{name}" if kind == "gdn2" else name] for name in ("beta", "g"))
    want = values["limit/state" if kind == "gdn2" else "state"]
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    rows, tokens, heads, size = k.shape
    x = torch.cat([torch.logit(beta), torch.log(torch.expm1(-g)).flatten(2)], -1)
    decay: Any = "channel" if g.dim() == 4 else "scalar"
    memory = Infini(heads * size, heads, update="gated_delta", decay=decay, channels=x.shape[-1]).double()
    assert memory.share is not None and memory.decay is not None and memory.decay.rate_H is not None
    with torch.no_grad():
        memory.share.weight.copy_(torch.eye(x.shape[-1])[:heads])
        memory.decay.weight_OR.copy_(torch.eye(x.shape[-1])[heads:])
        memory.decay.bias_O.zero_()
    v, start, want = (torch.nn.functional.pad(t, (0, size - t.shape[-1])) for t in (v, start, want))
    held = memory.init_state(rows, x)._replace(matrix_BHEF=start, tokens_B=torch.ones(rows, dtype=torch.long))
    for lengths in ([tokens], [1] * tokens, [3, tokens - 3]):
        state = written(memory, k.transpose(1, 2), v.transpose(1, 2), x, held, lengths)
        torch.testing.assert_close(state.matrix_BHEF, want, rtol=0, atol=1e-10)


def test_the_gated_rule_by_hand_and_its_half_lives() -> None:
    """Of width 1, with b = e^g = 1/2."""
    memory = Infini(1, 1, update="gated_delta").double()
    assert memory.share is not None and memory.decay is not None
    torch.nn.init.zeros_(memory.share.weight), torch.nn.init.zeros_(memory.decay.bias_O)
    one, v = torch.ones(1, 1, 2, 1).double() * 1e3, torch.tensor([[[[8.0], [2.0]]]]).double()
    state = written(memory, one, v, one[:, 0], memory.init_state(1, one), [2])
    assert state.matrix_BHEF.item() == pytest.approx(8 / 8 + 2 / 2, abs=1e-9)
    for decay in ("scalar", "channel"):
        memory = Infini(64, 8, update="gated_delta", decay=decay, half_life=(8.0, 16.0)).double()  # type: ignore[arg-type]
        x, silent = torch.randn(1, 8, 64).double(), torch.zeros(1, 8, 8, 8).double()
        held = memory.init_state(1, x)._replace(matrix_BHEF=torch.ones(1, 8, 8, 8).double(), tokens_B=torch.ones(1))
        left = written(memory, silent, silent, x, held, [3, 5]).matrix_BHEF
        lives = -8 * math.log(2) / left.log()
        assert 8 - 1e-6 < lives.min() < lives.max() < 16 + 1e-6


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, 1, count, E, dtype=torch.float64, generator=generator)
    return elu_features(2 * k), v


def stored(s: Tensor, v: Tensor, update: Any, lengths: list[int], **options: int) -> tuple[Tensor, Tensor]:
    """M and z after these pairs in segments of such lengths."""
    M, z = torch.zeros(1, 1, E, E, dtype=torch.float64), torch.zeros(1, 1, E, dtype=torch.float64)
    for s_part, v_part in zip(s.split(lengths, 2), v.split(lengths, 2), strict=True):
        M, z = store(M, z, s_part, v_part, update, **options)
    return M, z


@updates
def test_where_a_stream_is_cut(update: str) -> None:
    s, v = pairs(12)
    whole = stored(s, v, update, [12])
    for lengths in ([5, 7], [1] * 12, [3, 1, 8], [11, 1]):
        M, z = stored(s, v, update, lengths)
        torch.testing.assert_close(z, whole[1], rtol=0, atol=1e-12)
        if update == "delta":
            assert (M - whole[0]).abs().max() > 0.1
        else:
            torch.testing.assert_close(M, whole[0], rtol=0, atol=1e-10)
    if update == "exact":
        for a, b in zip(whole, stored(s, v, "delta", [1] * 12), strict=True):  # of one token they are the same rule
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_pair_that_is_written_twice() -> None:
    """The delta rules leave M, and z counts the key again, so that what is read halves; a mean is a mean."""
    s, v = pairs(1)
    twice = torch.cat([s, s], 2), torch.cat([v, v], 2)
    for update in ("linear", "delta", "exact"):
        once, again = stored(s, v, update, [1]), stored(*twice, update, [1, 1])
        torch.testing.assert_close(again[1], 2 * once[1], rtol=0, atol=1e-12)
        torch.testing.assert_close(again[0], once[0] * (2 if update == "linear" else 1), rtol=0, atol=1e-12)
        torch.testing.assert_close(recall(s, *once), v, rtol=0, atol=1e-12)
        torch.testing.assert_close(recall(s, *again), v if update == "linear" else v / 2, rtol=0, atol=1e-12)
        many = stored(s.repeat(1, 1, 9, 1), v.repeat(1, 1, 9, 1), update, [1] * 9)
        torch.testing.assert_close(recall(s, *many), v if update == "linear" else v / 2, rtol=0, atol=1e-12)
    # Within one segment the paper's rule knows of neither; the exact one does.
    torch.testing.assert_close(recall(s, *stored(*twice, "delta", [2])), v, rtol=0, atol=1e-12)
    torch.testing.assert_close(recall(s, *stored(*twice, "exact", [2])), v / 2, rtol=0, atol=1e-12)


@updates
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite(update: str, dtype: torch.dtype) -> None:
    """Sums of 60,000 features that are 5 on average, which float16 does not hold; the state is of float32."""
    memory = Infini(32, 1, update=update)  # type: ignore[arg-type]
    state = memory.init_state(1, torch.zeros((), dtype=dtype))
    assert state.matrix_BHEF.dtype == state.mass_BHE.dtype == torch.float32
    for _ in range(30):
        q, k, v = (4 + torch.randn(3, 1, 1, 2000, 32)).to(dtype)
        query = Query(torch.zeros(1, 2000, 32), q, k_BHNE=k, v_BHNE=v)
        reading = memory.read(memory.open(state, None, None), query, None)
        out = memory.combine(v, query, reading)
        state, _ = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))
        assert out.dtype == dtype and bool(out.isfinite().all())
    assert state.mass_BHE.min() > torch.finfo(torch.float16).max
    if update == "linear":
        torch.testing.assert_close(reading.output_BHNE, torch.full((1, 1, 2000, 32), 4.0), rtol=0, atol=0.1)


@updates
def test_keys_of_which_nothing_is_left_give_zeros_and_no_nan(update: str) -> None:
    """exp(-200) is 0 in float32."""
    q = torch.full((1, 1, 3, E), -200.0, requires_grad=True)
    v = torch.ones(1, 1, 3, E)
    M, z = store(torch.zeros(1, 1, E, E), torch.zeros(1, 1, E), elu_features(q), v, update)  # type: ignore[arg-type]
    read = recall(elu_features(q), *store(M, z, elu_features(q), v, update))  # type: ignore[arg-type]
    read.sum().backward()
    assert not read.any() and q.grad is not None and bool(q.grad.isfinite().all())


HOSTED = {"update": "exact", "initial_gate": -4.0}


def hosted(host: Architecture, **options: Any) -> Any:
    return add_memory(host.build(), "infini", segment_length=5, **{**HOSTED, **options})


@architectures(DECODERS)
def test_in_a_decoder_the_first_segment_is_the_host_s_and_the_next_nearly(host: Architecture) -> None:
    plain, ids = host.build(), words(2, 10)
    model = hosted(host)
    with torch.no_grad():
        found, first, second = model(ids).logits, plain(ids[:, :5]).logits, plain(ids[:, 5:]).logits
    assert torch.equal(found[:, :5], first)
    far = [(m(ids).logits[:, 5:] - second).abs().max() for m in (model, hosted(host, initial_gate=0.0))]
    assert 0 < far[0] < far[1] / 10
    for module in model.modules():
        if isinstance(module, Infini):
            module.close_gate()
    assert torch.equal(model(ids).logits[:, 5:], second)


def test_other_hosts_take_it_or_say_why_not() -> None:
    model, ids = hosted(BERT).eval(), words(2, 10)
    far = (model(ids).logits - hosted(BERT, initial_gate=3.0).eval()(ids).logits).abs()
    # The first token is read in front of every segment, and answers for the last one.
    assert far[:, 1:5].max() == 0 < far[:, 5:].max()
    for host in (BART, T5):
        with pytest.raises(ValueError, match="'infini' needs state"):
            hosted(host)
