"""The Compressive Transformer: a twin in loops, limits, bookkeeping, gradients.

Legend: B rows, N tokens, D model width, H heads, E head width, M slots.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from memories.harness import agree, build, inputs, layer_of, logit, run, run_layer, sines
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.compressive import Compressive, CompressiveState
from cached_transformers.positions import RelativePositions

D, H, E = 8, 2, 4
Vector = tuple[Tensor, int]
"""What one slot holds, and where it stands."""


class TwinRow:
    """One row, one vector at a time, in lists."""

    def __init__(self, layer: SelfAttention) -> None:
        self.layer, self.memory = layer, layer.memory
        self.relative = isinstance(layer.positions, RelativePositions)
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
                codes = [sines(places[i] - places[j], D) if self.relative else None for j in range(i + 1)]
                scheme = self.layer.positions
                logits = [logit(scheme, q, projected[j][1][head], head, code) for j, code in enumerate(codes)]
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
    memory = Compressive(D, H, **{"length": 4, "compressed": 3, "rate": 3, **OPTIONS[name]})
    layer = layer_of(memory, 0.3, positions=memory.position_scheme(), norm=nn.LayerNorm(D))
    lengths, compressed, expected = (5, 1, 7, 2, 9), 0, torch.zeros(())
    xs = [x.requires_grad_() for x in inputs(*lengths)]
    hidden = [torch.zeros(2, n, dtype=torch.bool) for n in lengths]
    for n, short, padding in zip(lengths, (3, 0, 7, 1, 4), hidden if padded else (), strict=padded):
        padding[0, short:], padding[1, : n - max(short, 1)] = True, n > 2
    outs, after, total = run_layer(layer, xs, hidden if padded else (), counted=True)
    twins, got, wanted = [TwinRow(layer) for _ in range(2)], [], []
    for x, padding, y, state in zip(xs, hidden, outs, after, strict=True):
        errors = []
        for row, twin in enumerate(twins):
            outputs, error = twin.segment(list(x[row, ~padding[row]]))
            got += list(y[row, ~padding[row]])
            wanted += outputs
            errors += [] if error is None else [error]
            for fifo, held in ((state.recent, twin.recent), (state.compressed, twin.compressed)):
                assert fifo.count_B[row] == len(held) and fifo.valid_BM[row].sum() == len(held)
                if held:
                    torch.testing.assert_close(fifo.hidden_BMD[row, -len(held) :], torch.stack([x for x, _ in held]))
                    assert fifo.positions_BMP[row, -len(held) :, 0].tolist() == [p for _, p in held]
        compressed += len(errors)
        if errors:
            expected = expected + sum(errors) / len(errors)
    assert layer.memory.loss is None or compressed > 3
    leaves = {**dict(layer.named_parameters()), **{str(i): x for i, x in enumerate(xs)}}
    agree([torch.stack(got), total], [torch.stack(wanted), expected], leaves, least=None)


def outputs(model: Any, tokens_BN: Tensor, segment: int) -> tuple[Tensor, list[Any]]:
    outs = run(model, tokens_BN.split(segment, 1))
    return torch.cat([out.outputs for out in outs], 1), outs


def test_without_compressed_slots_and_in_evaluation() -> None:
    tokens = torch.randint(0, 11, (2, 31))
    xl = build({"name": "transformer_xl", "length": 7})
    ours = build({"name": "compressive", "length": 7, "compressed": 0, "rate": 4})
    ours.load_state_dict(xl.state_dict())
    assert torch.equal(outputs(ours, tokens, 5)[0], outputs(xl, tokens, 5)[0])
    memory = Compressive(D, H, length=4, compressed=3, rate=2, eval_length=2, eval_compressed=9)
    for training, sizes in ((True, (3, 5)), (False, (9, 3))):
        memory.train(training)
        state = memory.init_state(1, torch.zeros(1))
        assert isinstance(state, CompressiveState)
        assert tuple(rows.hidden_BMD.shape[1] for rows in state) == sizes
    model, tokens = build({"name": "compressive", "length": 4, "compressed": 4}), torch.randint(0, 11, (2, 30))
    assert max(out.auxiliary_loss for out in outputs(model, tokens, 6)[1]) > 0
    assert max(out.auxiliary_loss for out in outputs(model.eval(), tokens, 6)[1]) == 0


def identity(memory: Any) -> None:
    with torch.no_grad():
        memory.function.linear.weight.copy_(torch.eye(memory.width))
        memory.function.linear.bias.zero_()


def test_with_groups_of_one_and_the_identity_it_is_a_longer_transformer_xl() -> None:
    tokens = torch.randint(0, 11, (2, 31))
    xl = build({"name": "transformer_xl", "length": 11})
    ours = build({"name": "compressive", "length": 4, "compressed": 7, "rate": 1})
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


def trained_parts(model: nn.Module) -> dict[str, float]:
    return {n: 0.0 if p.grad is None else p.grad.abs().max().item() for n, p in model.named_parameters()}


@pytest.mark.parametrize("function", ["conv", "dilated"])
@pytest.mark.parametrize("loss", ["attention", "autoencoding", "task"])
def test_what_each_loss_trains(function: str, loss: str) -> None:
    """The model's loss never moves the compression, nor its loss the model; with "task" the model's alone does."""
    spec = {"name": "compressive", "length": 4, "compressed": 4, "rate": 2, "function": function, "loss": loss}
    model, tokens = build(spec), torch.randint(0, 11, (3, 24))
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
