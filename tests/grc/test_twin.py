"""GRC against a slow twin: Algorithm 1 of arXiv:2312.12742 with one row, slot, query and head at a time, in float64.

The update gate of `grc_stream` that can close has a twin of its own.

Legend: B rows, N tokens, M slots, D model width, C cache width."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from memories.harness import agree
from torch import Tensor, nn

from cached_lab.experiments.reports.collect import collect_gates
from cached_transformers import GRCAttention, create_model
from cached_transformers.memories.grc.equations import Candidate, GateWeights, gate_update, mean_gate_update
from cached_transformers.memories.grc.stream import StreamGRC
from cached_transformers.memories.parts.options import gated

WIDTH, HEADS, ROWS = 8, 2, 2
CANDIDATES: tuple[Candidate, ...] = ("norm", "tanh", "affine")


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax attention of one query of one head."""
    logits = [(query * key).sum() / math.sqrt(len(query)) for key in keys]
    shares = [torch.exp(logit - max(logits)) for logit in logits]
    return sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares)  # type: ignore[return-value]


def new_slot(layer: GRCAttention, token: Tensor, slot: Tensor) -> Tensor:
    """One slot of one row after the update by one token (equations 3-5)."""
    gates = layer.memory.cache
    width = gates.width
    # The paper's W [s, c]: one matrix on both, here put together from its two halves.
    both = torch.cat([gates.from_tokens.weight, gates.from_cache.weight], 1)
    update_W, reset_W, candidate_W = both.split(width)
    update_b, reset_b, candidate_b = gates.from_tokens.bias.split(width)
    seen = torch.cat([token, slot])
    update = 1 / (1 + torch.exp(-(update_W @ seen + update_b)))
    reset = 1 / (1 + torch.exp(-(reset_W @ seen + reset_b)))
    fresh = candidate_W @ torch.cat([token, reset * slot]) + candidate_b
    if gates.candidate == "tanh":
        fresh = torch.tanh(fresh)
    elif gates.candidate == "norm":
        fresh = fresh * (1 + torch.erf(fresh / math.sqrt(2))) / 2
        centred = fresh - fresh.mean()
        fresh = centred / torch.sqrt((centred**2).mean() + gates.norm.eps) * gates.norm.weight + gates.norm.bias
    return (1 - update) * slot + update * fresh


def twin(layer: GRCAttention, x_BND: Tensor, cache_MC: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, N, D) of a training forward of `layer` that starts from `cache_MC`, and the new cache (M, C)."""
    memory, heads = layer.memory, layer.heads
    rows, n, width = x_BND.shape
    slots, c = cache_MC.shape
    updated = [[new_slot(layer, x_BND[b, i * n // slots, :c], cache_MC[i]) for i in range(slots)] for b in range(rows)]
    mean = [sum(updated[b][i] for b in range(rows)) / rows for i in range(slots)]
    merged = []
    for b, t in itertools.product(range(rows), range(n)):
        attended = mean if memory.cache.attend == "mean" else updated[b]
        parts = []
        for h in range(heads):
            own = [layer.qkv(x_BND[b, j]).view(3, heads, -1)[:, h] for j in range(n)]
            y = attend(own[t][0], [o[1] for o in own], [o[2] for o in own])
            pairs = [memory.branch.key_value(slot) for slot in attended]
            keys = [pair[:c].view(heads, -1)[h] for pair in pairs]
            values = [pair[c:].view(heads, -1)[h] for pair in pairs]
            o = attend(memory.branch.query(x_BND[b, t, :c]).view(heads, -1)[h], keys, values)
            o = torch.cat([o, o.new_zeros(len(y) - len(o))])
            ratio = 1 / (1 + torch.exp(-memory.branch.gate_H[h]))
            parts.append(ratio * o + (1 - ratio) * y)
        merged.append(layer.output(torch.cat(parts)))
    return torch.stack(merged).view(rows, n, width), torch.stack(mean)  # type: ignore[arg-type]


def make_layer(length: int, **options: object) -> GRCAttention:
    layer = GRCAttention(WIDTH, HEADS, length, **options).double()  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        offset = 1.0 if name.endswith("norm.weight") else 0.0
        nn.init.normal_(parameter, offset, 0.5)
    return layer


@pytest.mark.parametrize("tokens, length", [(4, 4), (5, 3), (3, 5)])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("combine", ["pad", "project"])
@pytest.mark.parametrize("update", ["mean", "sample"])
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_two_training_steps_and_all_gradients(
    candidate: Candidate, update: str, combine: str, ratio: float, tokens: int, length: int
) -> None:
    layer = make_layer(length, candidate=candidate, attend=update, combine=combine, ratio=ratio)
    cache_MC = torch.zeros(length, int(ratio * WIDTH), dtype=torch.float64)
    for _ in range(2):  # the second step starts from a cache that holds something
        x_BND = torch.randn(ROWS, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        expected, new_MC = twin(layer, x_BND, cache_MC)
        agree([layer(x_BND).y_BND], [expected], {"x": x_BND, **dict(layer.named_parameters())}, least=None)
        cache_MC = new_MC.detach()
        layer.memory.cache.commit()
        torch.testing.assert_close(layer.memory.cache.cache_MC, cache_MC, rtol=0, atol=1e-10)


class Inputs:
    """Random inputs of one update in float64."""

    def __init__(self, candidate: Candidate, rows: int = 3, slots: int = 2, width: int = 4) -> None:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

        self.candidate = candidate
        self.s_BMC, self.cache_MC = leaf(rows, slots, width), leaf(slots, width).detach()
        self.parameters = [leaf(3 * width, width), leaf(3 * width), leaf(3 * width, width)]
        if candidate == "norm":
            self.parameters += [leaf(width), leaf(width)]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.s_BMC, *self.parameters]

    def weights(self, *leaves: Tensor) -> GateWeights:
        tokens, bias, cache, *norm = leaves or self.parameters
        return GateWeights(tokens, bias, cache, (norm[0], norm[1], 1e-5) if norm else None)

    def mean(self, s_BMC: Tensor, *parameters: Tensor, weight_B: Tensor | None = None) -> Tensor:
        return mean_gate_update(s_BMC, self.cache_MC, self.weights(*parameters), self.candidate, weight_B)

    def rows(self) -> Tensor:
        return gate_update(self.s_BMC, self.cache_MC, self.weights(), self.candidate)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("weight", [None, [True, False, True], [False, True, False]])
def test_mean_update_is_the_mean_of_row_updates(candidate: Candidate, weight: list[bool] | None) -> None:
    given = Inputs(candidate)
    weight_B = None if weight is None else torch.tensor(weight)
    kept = slice(None) if weight_B is None else weight_B
    expected, got = given.rows()[kept].mean(0), given.mean(*given.leaves, weight_B=weight_B)
    agree([got], [expected], {str(i): t for i, t in enumerate(given.leaves)}, atol=1e-12, grads=1e-12, least=1e-3)


def test_a_second_derivative_is_refused() -> None:
    given = Inputs("norm")
    loss = given.mean(*given.leaves).square().sum()
    (grad,) = torch.autograd.grad(loss, given.s_BMC, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("combine", ["pad", "project"])
def test_an_open_gate_at_ratio_one_hears_only_the_cache(combine: str) -> None:
    layer = make_layer(5, ratio=1.0, combine=combine)
    layer.memory.branch.gate_H.data.fill_(torch.inf)
    layer.memory.cache.cache_MC.normal_()
    layer.eval()
    x_BND = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64)
    before = layer(x_BND).y_BND
    layer.qkv.weight.data.normal_()
    assert torch.equal(layer(x_BND).y_BND, before)


@pytest.mark.parametrize("x", [-9.0, -2.5, -2.0, 0.0, 1.5, 2.3, 2.5, 9.0])
def test_the_gate_is_cut_at_both_ends(x: float) -> None:
    x_ = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    got = gated(x_, "stretched")
    share = 1 / (1 + math.exp(-x))
    assert got.item() == pytest.approx(min(max(-0.1 + 1.2 * share, 0.0), 1.0), abs=1e-12)
    (slope,) = torch.autograd.grad(got, x_)
    inside = 1 / 12 < share < 11 / 12
    assert slope.item() == pytest.approx(1.2 * share * (1 - share) if inside else 0.0, abs=1e-12)


def one_slot(s: Tensor, slot: Tensor, weights: GateWeights, candidate: str) -> Tensor:
    """One slot, channel by channel, with tanh or the token itself as the candidate."""
    width = len(s)
    of_tokens, of_cache = weights.tokens.split(width), weights.cache.split(width)
    b = weights.bias.split(width)
    new = []
    maps = range(width if candidate == "tanh" else 0)
    reset = [1 / (1 + torch.exp(-(of_tokens[1][c] @ s + of_cache[1][c] @ slot + b[1][c]))) for c in maps]
    for c in range(width):
        share = 1 / (1 + torch.exp(-(of_tokens[0][c] @ s + of_cache[0][c] @ slot + b[0][c])))
        update = min(max(-0.1 + 1.2 * share, torch.zeros_like(share)), torch.ones_like(share))
        fresh = s[c]
        if reset:
            fresh = torch.tanh(of_tokens[2][c] @ s + of_cache[2][c] @ (torch.stack(reset) * slot) + b[2][c])
        new.append((1 - update) * slot[c] + update * fresh)
    return torch.stack(new)


@pytest.mark.parametrize("candidate", ["tanh", "copy"])
def test_an_update_is_that_of_a_slow_twin(candidate: Any) -> None:
    rows, slots, width, maps = 2, 3, 4, 4 if candidate == "copy" else 12
    leaves = [
        (2 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        for shape in ((rows, slots, width), (rows, slots, width), (maps, width), (maps,), (maps, width))
    ]
    s_BMC, cache_BMC, tokens, bias, cache = leaves
    weights = GateWeights(tokens, bias, cache, None)
    got = gate_update(s_BMC, cache_BMC, weights, candidate, update_gate="stretched")
    pairs = [zip(*row, strict=True) for row in zip(s_BMC, cache_BMC, strict=True)]
    wanted = torch.stack([torch.stack([one_slot(*pair, weights, candidate) for pair in row]) for row in pairs])
    agree([got], [wanted], {str(i): t for i, t in enumerate(leaves)}, atol=1e-12, grads=1e-11)
    assert bool((got == cache_BMC).any()) and bool((got != cache_BMC).any())  # some are closed, and some are not


def test_an_open_gate_on_copies_is_a_window() -> None:
    """Slots that each segment overwrites with its tokens are the last segment: Transformer-XL without detaching."""
    sizes = {"vocabulary": 5, "width": 8, "depth": 2, "heads": 2, "feed_forward": 8}
    grc, window = (
        create_model("language_model", **sizes, memory=memory).double()
        for memory in (
            {"name": "grc_stream", "length": 4, "preset": "text"},
            {"name": "transformer_xl", "length": 4, "relative": False},
        )
    )
    window.load_state_dict({k: v for k, v in grc.state_dict().items() if ".gates." not in k})
    for cache in (m for m in grc.modules() if isinstance(m, StreamGRC)):
        nn.init.zeros_(cache.gates.from_tokens.weight)
        nn.init.zeros_(cache.gates.from_cache.weight)
        nn.init.constant_(cache.gates.from_tokens.bias, torch.inf)
    states: list[Any] = [None, None]
    for segment in torch.randint(0, 5, (3, 2, 4)):
        outs = [model(segment, state) for model, state in zip((grc, window), states, strict=True)]
        torch.testing.assert_close(outs[0].outputs, outs[1].outputs, rtol=0, atol=1e-12)
        states = [out.state for out in outs]
    assert collect_gates(grc) == []


@pytest.mark.parametrize("update_gate", ["sigmoid", "stretched"])
def test_what_a_closed_gate_keeps_is_kept_to_the_last_bit(update_gate: str) -> None:
    """Left at -4 by all the text, a sigmoid wears off a fiftieth with every segment, and the stretched gate nothing."""
    memory = {"name": "grc_stream", "length": 4, "ratio": 1.0, "update_gate": update_gate}
    model = create_model(
        "language_model", vocabulary=5, width=8, depth=1, heads=2, feed_forward=8, memory=memory
    ).eval()
    (grc,) = (m for m in model.modules() if isinstance(m, StreamGRC))
    segments = [torch.randint(0, 5, (1, 4)) for _ in range(302)]
    with torch.no_grad():
        state = model(segments[0]).state
        state = model(segments[1], state).state  # the first segment is written when the second one reads
        grc.gates.from_tokens.weight[:8].zero_()
        grc.gates.from_cache.weight[:8].zero_()
        grc.gates.from_tokens.bias[:8] = -4.0
        written = state.layers[0].cache_BMC.clone()
        for segment in segments[2:]:
            state = model(segment, state).state
    held = state.layers[0].cache_BMC
    assert written.abs().max() > 0.1
    if update_gate == "stretched":
        assert torch.equal(held, written)
    else:
        likeness = torch.nn.functional.cosine_similarity(held.flatten(), written.flatten(), 0)
        assert (held - written).abs().max() > 0.1 and likeness < 0.9
