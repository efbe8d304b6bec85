"""Infini-attention: a slow twin, what cuts, repetitions and strange keys do to what is stored, and that it learns.

Legend: B rows, N tokens, H heads, E head width (F a second one), D = H E.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import (
    BART,
    BERT,
    DECODERS,
    T5,
    Architecture,
    architectures,
    words,
)
from torch import Tensor

from cached_lab.training.optim import parameter_groups
from cached_transformers import add_memory, create_model
from cached_transformers.interfaces.memory import LayerMemory, Query, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.infini import Infini, InfiniMatrix, recall, sigma, store

ROWS, HEADS, WIDTH, E = 2, 2, 8, 4
updates = pytest.mark.parametrize("update", ["linear", "delta", "exact"])


def layer_of(memory: LayerMemory | None = None, **options: Any) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(WIDTH, HEADS, memory=memory or Infini(WIDTH, HEADS, **options), causal=True).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return layer


def run(layer: SelfAttention, inputs: list[Tensor], paddings: list[Tensor] | None = None) -> tuple[list[Tensor], Any]:
    """Outputs of the layer over segments, and the state behind them."""
    state, outs = layer.memory.init_state(len(inputs[0]), inputs[0]), []
    for x, padding in zip(inputs, paddings or [None] * len(inputs), strict=True):
        attended = layer(x, state=state, padding_BN=padding)
        state, _ = layer.memory.write(state, Trace(x, attended.y_BND, attended.query, attended.reading))
        outs.append(attended.y_BND)
    return outs, state


def segments(*lengths: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, n, WIDTH, dtype=torch.float64, generator=generator) for n in lengths]


def lifted(x: float | Tensor) -> Tensor:
    """elu + 1 of one number."""
    x = torch.as_tensor(x)
    return x + 1 if x > 0 else x.exp()


def features(t_E: Tensor) -> Tensor:
    return torch.stack([lifted(c) for c in t_E])


class Head:
    """M and z of one head and row, one token after the other."""

    def __init__(self) -> None:
        self.M, self.z = torch.zeros(E, E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
        self.tokens = 0

    def answer(self, asked_E: Tensor) -> Tensor:
        if not self.tokens:
            return torch.zeros(E, dtype=torch.float64)
        s_E = features(asked_E)
        return torch.stack([sum(s_E[i] * self.M[i, j] for i in range(E)) for j in range(E)]) / (s_E @ self.z)

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
                        y = g * heads[b][h].answer(q[n, h]) + (1 - g) * y
                    mixed.append(y)
                tokens.append(layer.output(torch.cat(mixed)))
            for h in range(HEADS):
                real = [j for j in range(x.shape[1]) if not padding[b, j]]
                heads[b][h].write([k[j, h] for j in real], [v[j, h] for j in real], update)
            rows.append(torch.stack(tokens))
        outs.append(torch.stack(rows))
    return outs


@updates
@pytest.mark.parametrize("first", ["bypass", "gated"])
def test_it_is_its_slow_twin_with_gradients(update: str, first: str) -> None:
    layer = layer_of(update=update, first=first, initial_gate=0.4)
    inputs = segments(5, 3, 4, 5)
    paddings = [torch.zeros(x.shape[:2], dtype=torch.bool) for x in inputs]
    paddings[0][1] = True  # this row's memory is empty for one segment more
    paddings[1][0, 0] = paddings[2][0, 2:] = paddings[2][1, 1] = True
    real = [~p for p in paddings]
    weights = segments(5, 3, 4, 5, seed=2)
    results = []
    for outputs in (run, lambda *a: (twin(*a, update, first), None)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        layer.zero_grad()
        found = outputs(layer, leaves, paddings)[0]
        sum((y[r] * w[r]).sum() for y, w, r in zip(found, weights, real, strict=True)).backward()  # type: ignore[union-attr]
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}  # type: ignore[union-attr]
        results.append((found, grads | {f"x{i}": x.grad for i, x in enumerate(leaves)}))
    for a, b, r in zip(results[0][0], results[1][0], real, strict=True):
        torch.testing.assert_close(a[r], b[r], rtol=0, atol=1e-10)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-7, atol=1e-9, msg=name)
        assert gradient.abs().max() > 1e-4, name
    assert results[0][1]["x0"][1].abs().max() == 0  # a row of padding


def test_three_tokens_by_hand() -> None:
    """One head of width 1: keys 0, 1, 0 have features 1, 2, 1."""
    s, v = torch.tensor([1.0, 2.0, 1.0]).view(1, 1, 3, 1), torch.tensor([3.0, 9.0, 6.0]).view(1, 1, 3, 1)
    expected = {
        "linear": 3 + 18 + 6.0,
        "delta": 3 + 18 + 6.0,  # against an empty matrix
        "exact": 3 + 2 * (9 - 3) + 1 * (6 - 15 / 3),  # 3; then 15; z is 1, then 3
    }
    for update, matrix in expected.items():
        M, z = store(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), s, v, update)  # type: ignore[arg-type]
        assert (M.item(), z.item()) == (matrix, 4)
        M, z = store(M, z, s[:, :, :1], v[:, :, :1], update)  # type: ignore[arg-type]
        assert M.item() == pytest.approx(matrix + 3 - (0 if update == "linear" else matrix / 4)) and z.item() == 5


def test_wide_open_and_token_by_token_it_is_linear_attention_over_the_past() -> None:
    memory = Infini(WIDTH, HEADS, update="linear", initial_gate=math.inf)
    q, k, v = torch.randn(3, ROWS, HEADS, 9, E, dtype=torch.float64)
    state = memory.init_state(ROWS, q)
    for n in range(9):
        at = slice(n, n + 1)
        query = Query(torch.zeros(ROWS, 1, WIDTH), q[:, :, at], k_BHNE=k[:, :, at], v_BHNE=v[:, :, at])
        reading = memory.read(memory.open(state, None, None), query, None)
        found = memory.combine(v[:, :, at], query, reading)  # a token that sees itself alone
        weights = sigma(q[:, :, at]) @ sigma(k[:, :, :n]).mT
        expected = (weights @ v[:, :, :n] / weights.sum(-1, keepdim=True)) if n else v[:, :, at]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        state, _ = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))


# ------------------------------------------------------------------------------------------------ what is stored


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, 1, count, E, dtype=torch.float64, generator=generator)
    return sigma(2 * k), v


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


def test_chunks_change_nothing() -> None:
    s, v = pairs(23)
    whole = stored(s, v, "exact", [23], chunk=64)
    for chunk in (1, 4, 22):
        for a, b in zip(stored(s, v, "exact", [23], chunk=chunk), whole, strict=True):
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


def test_another_value_under_the_same_key() -> None:
    s, v = pairs(1)
    other = pairs(1, seed=3)[1]
    for update, expected in (("linear", (v + other) / 2), ("delta", other / 2), ("exact", other / 2)):
        M, z = stored(torch.cat([s, s], 2), torch.cat([v, other], 2), update, [1, 1])
        torch.testing.assert_close(recall(s, M, z), expected, rtol=0, atol=1e-12)


def test_a_key_like_no_other() -> None:
    """What is read is a mean of whatever there is, however little it is alike, down to next to nothing: also for a new
    key, from whose value the delta rules take that mean."""
    v_0, v_1 = pairs(2)[1][0, 0]
    for low, subtracted in ((-12.0, v_0), (-40.0, torch.zeros(E).double())):
        s = sigma(torch.tensor([[9.0, low, low, low], [low, 9.0, low, low]]).double()).view(1, 1, 2, E)
        for update in ("linear", "delta", "exact"):
            read = recall(s, *stored(s, torch.stack([v_0, v_1])[None, None], update, [1, 1]))[0, 0]
            expected = torch.stack([v_0, v_1 if update == "linear" else v_1 - subtracted])
            torch.testing.assert_close(read, expected, rtol=0, atol=1e-4)


def test_heads_do_not_hear_of_each_other() -> None:
    def read(change: float, update: Any) -> tuple[Tensor, InfiniMatrix]:
        generator = torch.Generator().manual_seed(0)
        memory = Infini(WIDTH, HEADS, update=update)
        state = memory.init_state(ROWS, torch.zeros(()))
        for _ in range(3):
            q, k, v, y = torch.randn(4, ROWS, HEADS, 5, E, generator=generator)
            for t in (q, k, v):
                t[:, 0] += change
            query = Query(torch.zeros(ROWS, 5, WIDTH), q, k_BHNE=k, v_BHNE=v)
            reading = memory.read(memory.open(state, None, None), query, None)
            out = memory.combine(y, query, reading)
            state, _ = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))
        return out, state

    for update in ("linear", "delta", "exact"):
        (out, state), (other, changed) = read(0.0, update), read(0.5, update)
        assert torch.equal(out[:, 1], other[:, 1]) and not torch.equal(out[:, 0], other[:, 0])
        for a, b in zip(state[:2], changed[:2], strict=True):
            assert torch.equal(a[:, 1], b[:, 1]) and not torch.equal(a[:, 0], b[:, 0])


# ---------------------------------------------------------------------------------------------- numbers and padding


@updates
def test_whatever_padding_holds_reaches_nothing(update: str) -> None:
    layer, inputs, paddings, results = layer_of(update=update), segments(5, 4, 4), [], []
    for x, behind in zip(inputs, (3, 2, 4), strict=True):  # in the first row, of an empty memory and of one that is not
        paddings.append(torch.zeros(x.shape[:2], dtype=torch.bool))
        paddings[-1][0, behind:] = True
    for filling in (0.0, math.nan):
        filled = [x.masked_fill(p[..., None], filling).requires_grad_() for x, p in zip(inputs, paddings, strict=True)]
        outs, state = run(layer, filled, paddings)
        real = [t[~p] for t, p in zip(outs, paddings, strict=True)]
        gradients = torch.autograd.grad(sum(t.square().sum() for t in real), filled)
        results.append((*real, *state, *(g[~p] for g, p in zip(gradients, paddings, strict=True))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all())
    assert results[0][5].tolist() == [9, 13]


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
    M, z = store(torch.zeros(1, 1, E, E), torch.zeros(1, 1, E), sigma(q), v, update)  # type: ignore[arg-type]
    read = recall(sigma(q), *store(M, z, sigma(q), v, update))  # type: ignore[arg-type]
    read.sum().backward()
    assert not read.any() and q.grad is not None and bool(q.grad.isfinite().all())


# ------------------------------------------------------------------------------------------- in models, and learning


def language_model(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 16}
    memory = {"name": "infini", "initial_gate": 1.0, **options}
    return create_model("language_model", vocabulary=11, memory=memory, **sizes).double()


def test_gates_do_not_decay() -> None:
    model: Any = language_model()
    kept: Any = parameter_groups(model, 0.1)[1]["params"]
    assert {id(block.attention.memory.gate_H) for block in model.stack.blocks} <= {id(p) for p in kept}


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
        with pytest.raises(ValueError, match=r"'infini'.*'grc'"):
            hosted(host)
