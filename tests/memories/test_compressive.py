"""The Compressive Transformer: a twin in loops, limits, bookkeeping, gradients.

Legend: B rows, N tokens, D model width, H heads, E head width, M slots.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import create_model
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.compressive import Compressive, CompressiveState, Gone
from cached_transformers.memories.parts.fifo_store import lined_up
from cached_transformers.positions import RelativePositions

D, H, E = 8, 2, 4
Vector = tuple[Tensor, int]
"""What one slot holds, and where it stands."""


def make_layer(**options: Any) -> SelfAttention:
    """A layer in float64 without a weight that is zero or one."""
    memory = Compressive(D, H, **options)
    layer = SelfAttention(
        D, H, memory=memory, positions=memory.position_scheme(), norm=nn.LayerNorm(D), causal=True
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def run(layer: SelfAttention, x_BND: Tensor, state: Any, clock_B: Tensor, padding_BN: Tensor | None = None) -> Any:
    """Output, state and loss after one segment."""
    n = x_BND.shape[1]
    steps = torch.arange(n) if padding_BN is None else ((~padding_BN).cumsum(1) - 1).clamp(min=0)
    places = (clock_B[:, None] + steps)[..., None]
    out = layer(x_BND, places, state=state, padding_BN=padding_BN, consecutive=padding_BN is None)
    trace = Trace(x_BND, out.y_BND, out.query, out.reading, out.weights_BHNL)
    return out.y_BND, *layer.memory.write(state, trace)


class TwinRow:
    """One row, one vector at a time, in lists."""

    def __init__(self, layer: SelfAttention) -> None:
        self.layer, self.memory = layer, layer.memory
        self.recent: list[Vector] = []
        self.compressed: list[Vector] = []
        self.clock = 0

    def project(self, x_D: Tensor, frozen: bool = False) -> list[list[Tensor]]:
        """Query, key, value, each as one vector a head."""
        norm, linear = self.layer.norm, self.layer.qkv
        parameters = [norm.weight, norm.bias, linear.weight, linear.bias]
        gain, shift, weight, bias = [p.detach() for p in parameters] if frozen else parameters
        h = (x_D - x_D.mean()) / (x_D.var(unbiased=False) + norm.eps).sqrt() * gain + shift
        return [list(part.split(E)) for part in (weight @ h + bias).split(D)]

    def logit(self, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
        scheme = self.layer.positions
        if not isinstance(scheme, RelativePositions):
            return q @ k / math.sqrt(E)
        angles = [distance * 10000 ** (-2 * i / D) for i in range(D // 2)]
        code = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)
        place = scheme.project.weight[head * E : (head + 1) * E] @ code
        return ((q + scheme.content_bias[head]) @ k + (q + scheme.position_bias[head]) @ place) / math.sqrt(E)

    def segment(self, tokens: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Outputs, and the row's error of compression; None where nothing was compressed."""
        context = self.compressed + self.recent
        slots = [x for x, _ in context]
        if self.memory.positions == "slots":
            places = [self.clock - len(slots) + i for i in range(len(slots))]
        else:
            places = [place for _, place in context]
        everything = slots + tokens
        places += [self.clock + i for i in range(len(tokens))]
        projected = [self.project(x) for x in everything]
        used: list[list[Tensor]] = [[] for _ in everything]
        outputs = []
        for i in range(len(slots), len(everything)):
            heads = []
            for head in range(H):
                q = projected[i][0][head]
                logits = [self.logit(q, projected[j][1][head], head, places[i] - places[j]) for j in range(i + 1)]
                weights = torch.stack(logits).softmax(0)
                heads.append(sum(weights[j] * projected[j][2][head] for j in range(i + 1)))
                for j in range(i + 1):
                    used[j].append(weights[j].detach())
            outputs.append(self.layer.output(torch.cat(heads)))
        usage = [float(torch.stack(u).mean()) if u else 0.0 for u in used][len(self.compressed) :]
        self.recent += [(x.detach(), self.clock + i) for i, x in enumerate(tokens)]
        self.clock += len(tokens)
        return outputs, self.compress([self.project(x.detach(), True)[0] for x in tokens], usage)

    def compress(self, queries: list[list[Tensor]], usage: list[float]) -> Tensor | None:
        memory, rate, evicted, made = self.memory, self.memory.rate, [], []
        while len(self.recent) - memory.length >= rate:
            group, self.recent = self.recent[:rate], self.recent[rate:]
            evicted += group
            if memory.function is not None:
                made.append((self.function([x for x, _ in group]), group[(rate - 1) // 2][1]))
        if "weights" in memory.needs:
            order = sorted(range(len(evicted)), key=lambda i: -usage[i])[: len(evicted) // rate]
            made = [evicted[i] for i in sorted(order)]
        self.compressed = (self.compressed + [(x.detach(), p) for x, p in made])[-memory.compressed :]
        if memory.loss is None or not evicted:
            return None
        if memory.loss == "autoencoding":
            parts = [memory.decoder(x).split(D) for x, _ in made]
            differences = [a - b for a, (b, _) in zip([p for part in parts for p in part], evicted, strict=True)]
        else:
            differences = []
            for query in queries:
                read = [self.read(query, [x for x, _ in some]) for some in (evicted, made)]
                differences.append(read[1] - read[0].detach())
        flat = torch.cat(differences)
        return flat.square().sum().sqrt() if memory.error == "norm" else flat.square().mean()

    def read(self, query: list[Tensor], xs: list[Tensor]) -> Tensor:
        projected, heads = [self.project(x, True) for x in xs], []
        for head in range(H):
            weights = torch.stack([query[head] @ p[1][head] / math.sqrt(E) for p in projected]).softmax(0)
            heads.append(sum(w * p[2][head] for w, p in zip(weights, projected, strict=True)))
        return torch.cat(heads)

    def function(self, group: list[Tensor]) -> Tensor:
        function = self.memory.function
        if hasattr(function, "linear"):
            weight, bias = function.linear.weight, function.linear.bias
            return sum((weight[:, i * D : (i + 1) * D] @ x for i, x in enumerate(group)), start=bias)
        if hasattr(function, "convolutions"):
            for depth, convolution in enumerate(function.convolutions):
                first, second = convolution.weight.unbind(-1)
                step = convolution.dilation[0]
                taps = group if depth == 0 else [F.gelu(x) for x in group]
                group = [first @ a + second @ b + convolution.bias for a, b in zip(taps, taps[step:], strict=False)]
            assert len(group) == 1
            return group[0]
        stacked = torch.stack(group)
        return stacked.mean(0) if function.reduce is torch.mean else stacked.max(0).values


OPTIONS: dict[str, dict[str, Any]] = {
    "conv": {},
    "conv-mean_square": {"error": "mean_square"},
    "autoencoding": {"loss": "autoencoding"},
    "autoencoding-mean_square": {"loss": "autoencoding", "error": "mean_square"},
    "dilated": {"function": "dilated"},
    "dilated-4": {"function": "dilated", "rate": 4},
    "mean": {"function": "mean"},
    "max-age": {"function": "max", "positions": "age"},
    "most_used": {"function": "most_used"},
    "most_used-age": {"function": "most_used", "positions": "age", "rate": 2},
    "conv-1": {"rate": 1},
    "absolute": {"relative": False, "rate": 2},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_its_slow_twin(name: str, padded: bool) -> None:
    layer = make_layer(**{"length": 4, "compressed": 3, "rate": 3, **OPTIONS[name]})
    rows = 2
    state, clock_B = layer.memory.init_state(rows, torch.zeros((), dtype=torch.float64)), torch.zeros(rows).long()
    twins = [TwinRow(layer) for _ in range(rows)]
    total, expected, compressed = torch.zeros(()).double(), torch.zeros(()).double(), 0
    leaves, others = [], []
    for n, short in zip((5, 1, 7, 2, 9), (3, 0, 7, 1, 4), strict=True):
        x_BND = torch.randn(rows, n, D, dtype=torch.float64, requires_grad=True)
        twin_x_BND = x_BND.detach().clone().requires_grad_()
        leaves.append(x_BND), others.append(twin_x_BND)
        padding_BN = torch.zeros(rows, n, dtype=torch.bool)
        if padded:
            padding_BN[0, short:] = True
            padding_BN[1, : n - max(short, 1)] = n > 2  # in front
        y_BND, state, loss = run(layer, x_BND, state, clock_B, padding_BN if padded else None)
        clock_B = clock_B + (~padding_BN).sum(1)
        errors = []
        for row, twin in enumerate(twins):
            real = [i for i in range(n) if not padding_BN[row, i]]
            outputs, error = twin.segment([twin_x_BND[row, i] for i in real])
            for i, output in zip(real, outputs, strict=True):
                torch.testing.assert_close(y_BND[row, i], output, rtol=0, atol=1e-10)
                total, expected = total + y_BND[row, i].sin().sum(), expected + output.sin().sum()
            errors += [] if error is None else [error]
            for fifo, held in ((state.recent, twin.recent), (state.compressed, twin.compressed)):
                assert fifo.count_B[row] == len(held) and fifo.valid_BM[row].sum() == len(held)
                if held:
                    torch.testing.assert_close(fifo.hidden_BMD[row, -len(held) :], torch.stack([x for x, _ in held]))
                    assert fifo.positions_BMP[row, -len(held) :, 0].tolist() == [p for _, p in held]
        want = sum(errors) / len(errors) if errors else torch.zeros(()).double()
        compressed += len(errors)
        if loss is None:
            assert not errors
        else:
            torch.testing.assert_close(loss, want, rtol=0, atol=1e-10)
            total, expected = total + loss, expected + want
    if layer.memory.loss is not None:
        assert compressed > 3
    parameters = [*layer.parameters(), *leaves]
    got = torch.autograd.grad(total, parameters, allow_unused=True)
    wants = torch.autograd.grad(expected, [*layer.parameters(), *others], allow_unused=True)
    for parameter, a, b in zip(parameters, got, wants, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=0, atol=1e-10)


def language_model(memory: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 11, "width": 16, "depth": 2, "heads": 2, "feed_forward": 32}
    return create_model("language_model", **{**sizes, "memory": memory, **options})


def outputs(model: nn.Module, tokens_BN: Tensor, segment: int) -> tuple[Tensor, list[Any]]:
    state, outs, states = None, [], []
    for piece in tokens_BN.split(segment, 1):
        out = model(piece, state)
        state = out.state
        outs.append(out.outputs)
        states.append(out)
    return torch.cat(outs, 1), states


def test_without_compressed_slots_it_is_transformer_xl() -> None:
    tokens = torch.randint(0, 11, (2, 31))
    xl = language_model({"name": "transformer_xl", "length": 7})
    ours = language_model({"name": "compressive", "length": 7, "compressed": 0, "rate": 4})
    ours.load_state_dict(xl.state_dict())
    assert torch.equal(outputs(ours, tokens, 5)[0], outputs(xl, tokens, 5)[0])


def identity(memory: Compressive) -> None:
    with torch.no_grad():
        memory.function.linear.weight.copy_(torch.eye(memory.width))  # type: ignore[union-attr, operator]
        memory.function.linear.bias.zero_()  # type: ignore[union-attr, operator]


def test_with_groups_of_one_and_the_identity_it_is_a_longer_transformer_xl() -> None:
    tokens = torch.randint(0, 11, (2, 31))
    xl = language_model({"name": "transformer_xl", "length": 11})
    ours = language_model({"name": "compressive", "length": 4, "compressed": 7, "rate": 1})
    ours.load_state_dict(xl.state_dict(), strict=False)
    for memory in ours.stack.layer_memories():
        identity(memory)
    got, outs = outputs(ours, tokens, 5)
    assert torch.equal(got, outputs(xl, tokens, 5)[0])
    # What is compressed without loss leaves nothing to reconstruct, and a distance of zero has no slope.
    assert [out.auxiliary_loss.item() for out in outs] == [0.0] * 7
    sum(out.auxiliary_loss for out in outs).backward()
    for memory in ours.stack.layer_memories():
        assert memory.function.linear.weight.grad.abs().max() == 0


@pytest.mark.parametrize("rate", [1, 2, 3, 5])
@pytest.mark.parametrize("segment", [1, 3, 4, 7, 16])
def test_which_tokens_are_kept_and_which_make_a_slot(rate: int, segment: int) -> None:
    """Inputs are their own numbers, so that a mean names its group; rows began at different times."""
    length, slots = 6, 4
    layer = make_layer(length=length, compressed=slots, rate=rate, function="mean")
    state = layer.memory.init_state(2, torch.zeros((), dtype=torch.float64))
    seen = torch.tensor([0, 0])
    for index in range(30 // segment + 1):
        x_BND = (seen[:, None] + torch.arange(segment))[..., None].double().expand(-1, -1, D)
        pauses = torch.zeros(2, segment, dtype=torch.bool)
        pauses[1] = index == 0
        _, state, _ = run(layer, x_BND, state, seen, pauses if index == 0 else None)
        seen = seen + (~pauses).sum(1)
        for row, total in enumerate(seen.tolist()):
            groups = max(total - length, 0) // rate
            recent = list(range(groups * rate, total))
            assert min(total, length) <= len(recent) < length + rate
            means = [k * rate + (rate - 1) / 2 for k in range(groups)][-slots:]
            for fifo, want in ((state.recent, recent), (state.compressed, means)):
                assert fifo.count_B[row] == len(want)
                torch.testing.assert_close(
                    fifo.hidden_BMD[row, :, 0],
                    torch.tensor([0.0] * (fifo.hidden_BMD.shape[1] - len(want)) + want).double(),
                )
            hidden_BMD, _, valid_BM = lined_up(*state)
            assert hidden_BMD[row, valid_BM[row], 0].tolist() == [*means, *recent]
            assert valid_BM[row].sort().values.equal(valid_BM[row]), "empty slots stand in front"


@pytest.mark.parametrize("positions", ["slots", "age"])
def test_where_a_slot_stands(positions: str) -> None:
    layer = make_layer(length=4, compressed=3, rate=3, function="mean", positions=positions)
    x_BND = torch.randn(1, 12, D, dtype=torch.float64)
    _, state, _ = run(layer, x_BND, layer.memory.init_state(1, x_BND), torch.zeros(1).long())
    query = layer(x_BND, torch.arange(12, 24)[None, :, None], state=state).query
    context = read_segment(layer.memory, state, query, layer.project_kv).context
    places = context.positions_BMP[0, context.valid_BM[0], 0].tolist()
    # Twelve tokens: two groups of three, and six that stay.
    assert places == (list(range(4, 12)) if positions == "slots" else [1, 4, *range(6, 12)])


def trained_parts(model: nn.Module) -> dict[str, float]:
    return {n: 0.0 if p.grad is None else p.grad.abs().max().item() for n, p in model.named_parameters()}


@pytest.mark.parametrize("function", ["conv", "dilated"])
@pytest.mark.parametrize("loss", ["attention", "autoencoding", "task"])
def test_what_each_loss_trains(function: str, loss: str) -> None:
    """The model's loss never moves the compression, nor its loss the model; with "task" the model's alone does."""
    spec = {"name": "compressive", "length": 4, "compressed": 4, "rate": 2, "function": function, "loss": loss}
    model, tokens = language_model(spec), torch.randint(0, 11, (3, 24))
    _, outs = outputs(model, tokens, 6)
    sum(out.outputs.square().mean() for out in outs).backward()
    by_model = trained_parts(model)
    own = [name for name in by_model if "memory." in name]
    assert own and all((by_model[name] > 0) == (loss == "task" or name not in own) for name in by_model)
    model.zero_grad()
    auxiliary = sum(out.auxiliary_loss for out in outputs(model, tokens, 6)[1])
    if loss == "task":
        assert auxiliary == 0
        return
    auxiliary.backward()
    assert all((value > 0) == (name in own) for name, value in trained_parts(model).items())


def test_the_loss_counts_neither_order_nor_padding_nor_rows_that_compressed_nothing() -> None:
    layer = make_layer(length=4, compressed=3, rate=2)
    x_BND = torch.randn(1, 9, D, dtype=torch.float64)
    fresh = layer.memory.init_state(1, x_BND)
    _, _, alone = run(layer, x_BND, fresh, torch.zeros(1).long())
    padding_BN = torch.zeros(2, 12, dtype=torch.bool)
    padding_BN[0, 9:], padding_BN[1, 3:] = True, True
    wide_BND = torch.cat([F.pad(x_BND, (0, 0, 0, 3), value=7.0), torch.randn(1, 12, D)], 0)
    _, _, both = run(layer, wide_BND, layer.memory.init_state(2, x_BND), torch.zeros(2).long(), padding_BN)
    torch.testing.assert_close(both, alone)
    # Attention without positions does not see the order of what it reads.
    query = layer(x_BND, torch.arange(9)[None, :, None], state=fresh)
    trace = Trace(x_BND, query.y_BND, query.query, query.reading)
    hidden, slots = torch.randn(1, 4, D, dtype=torch.float64), torch.randn(1, 2, D, dtype=torch.float64)
    gone = Gone(fresh.recent, hidden, torch.zeros(1, 4, 1).long(), torch.ones(1, 4, dtype=torch.bool))
    real = torch.ones(1, 2, dtype=torch.bool)
    losses = [
        layer.memory._attention_loss(gone._replace(hidden_BED=order), slots, real, trace)
        for order in (hidden, hidden.flip(1), hidden[:, [2, 0, 3, 1]], hidden[:, [0, 0, 3, 1]])
    ]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])
    assert (losses[3] - losses[0]).abs() > 1e-6


def test_evaluation_has_sizes_of_its_own_and_no_loss() -> None:
    memory = Compressive(D, H, length=4, compressed=3, rate=2, eval_length=2, eval_compressed=9)
    for training, sizes in ((True, (3, 5)), (False, (9, 3))):
        memory.train(training)
        state = memory.init_state(1, torch.zeros(1))
        assert isinstance(state, CompressiveState)
        assert tuple(rows.hidden_BMD.shape[1] for rows in state) == sizes
    model, tokens = language_model({"name": "compressive", "length": 4, "compressed": 4}), torch.randint(0, 11, (2, 30))
    assert max(out.auxiliary_loss for out in outputs(model, tokens, 6)[1]) > 0
    assert max(out.auxiliary_loss for out in outputs(model.eval(), tokens, 6)[1]) == 0


def test_the_most_used_stay() -> None:
    """One head that looks for the number 3: of the group that holds it, it is what stays."""
    layer = make_layer(length=2, compressed=4, rate=4, function="most_used", relative=False)
    with torch.no_grad():
        layer.norm = nn.Identity()
        layer.qkv.weight.zero_(), layer.qkv.bias.zero_()
        layer.qkv.weight[D : 2 * D].fill_(1.0)  # a key is as large as its number
        layer.qkv.bias[:D] = 1.0
    for numbers in ([0, 3, 1, 2, 0, 0], [3, 0, 1, 2, 0, 0], [0, 0, 1, 3, 0, 0]):
        x_BND = torch.tensor(numbers).double()[None, :, None].expand(-1, -1, D)
        # A pause first, so that all six are context when the next segment pushes the first four out.
        state = layer.memory.init_state(1, x_BND)
        _, state, _ = run(layer, x_BND[:, :5], state, torch.zeros(1).long())
        _, state, _ = run(layer, x_BND[:, 5:], state, torch.full((1,), 5))
        assert state.compressed.count_B.tolist() == [1] and state.compressed.hidden_BMD[0, -1, 0] == 3
