"""The harness of the tests of memories: small models and layers in float64, streams, and comparisons with slow twins.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.interfaces.memory import LayerMemory, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.parts.composite import SideBySide

VOCABULARY, WIDTH, HEADS, SEGMENT, ROWS = 11, 8, 2, 5, 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
long_streams = pytest.mark.parametrize(
    ("tokens", "seed"), [(4096, 0), *(pytest.param(65536, seed, marks=pytest.mark.slow) for seed in range(3))]
)


def wild(module: Any, scale: float = 0.3) -> Any:
    """The module in float64, none of whose parameters keeps an initial value that would hide its effect."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters() if scale else ():
            parameter.add_(scale * torch.randn_like(parameter))
    return module


def build(memory: Any = None, *, scale: float = 0.3, model: str = "language_model", **options: Any) -> Any:
    """A small model, with the same weights at every call; `scale=0` leaves its initial values."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "depth": 2, "heads": HEADS, "feed_forward": 16}
    return wild(create_model(model, **{**sizes, **options}, memory=memory), scale)


def layer_of(memory: LayerMemory, scale: float = 0.5, **options: Any) -> Any:
    """A causal attention layer of the width of the models here, with this memory."""
    return wild(SelfAttention(WIDTH, HEADS, memory=memory, causal=True, **options), scale)


def segments(count: int, rows: int = ROWS, length: int = SEGMENT, seed: int = 0) -> tuple[Tensor, ...]:
    """Token ids (rows, length) of so many segments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, count * length), generator=generator).split(length, 1)


def paddings(count: int) -> list[Tensor]:
    """Padding after, before and among the tokens of rows; a row that begins late, one that pauses; none."""
    padding = torch.zeros(count, ROWS, SEGMENT, dtype=torch.bool)
    padding[0, 0, 3:], padding[0, 1, :2], padding[0, 2] = True, True, True
    padding[1, 0, 1:3], padding[1, 1] = True, True
    return list(padding)


def inputs(*lengths: int, rows: int = 2, seed: int = 1) -> list[Tensor]:
    """Hidden states (rows, N, WIDTH) of segments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, WIDTH, generator=generator, **DOUBLE) for n in lengths]


def run(model: Any, segments: Sequence[Tensor], state: Any = None, paddings: Sequence[Tensor | None] = ()) -> list[Any]:
    """The model's answer to each segment, the state carried from one to the next."""
    outs = []
    for index, segment in enumerate(segments):
        outs.append(model(segment, state, padding=paddings[index] if paddings else None))
        state = outs[-1].state
    return outs


def run_layer(
    layer: Any,
    inputs: Sequence[Tensor],
    paddings: Sequence[Tensor | None] = (),
    state: Any = None,
    counted: bool = False,
) -> tuple[list[Tensor], list[Any], Tensor]:
    """Outputs of a layer over segments, the states after them, and the sum of the memory's losses.

    Args:
        counted: give positions, which count the tokens that are no padding.
    """
    state = layer.memory.init_state(len(inputs[0]), inputs[0]) if state is None else state
    outs, after, total = [], [], torch.zeros(())
    clock_B1 = torch.zeros(len(inputs[0]), 1, dtype=torch.long)
    for x, padding in zip(inputs, paddings or [None] * len(inputs), strict=True):
        real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding
        places = ((clock_B1 + (real.cumsum(1) - 1).clamp(min=0))[..., None],) if counted else ()
        attended = layer(x, *places, state=state, padding_BN=padding)
        trace = Trace(x, attended.y_BND, attended.query, attended.reading, attended.weights_BHWL)
        state, loss = layer.memory.write(state, trace)
        outs.append(attended.y_BND)
        after.append(state)
        total, clock_B1 = total if loss is None else total + loss, clock_B1 + real.sum(1, keepdim=True)
    return outs, after, total


def sines(distance: int, width: int) -> Tensor:
    """Transformer-XL's code of a distance: all sines, then all cosines."""
    angle = [distance * 10000 ** (-2 * k / width) for k in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angle] + [math.cos(a) for a in angle], **DOUBLE)


def logit(scheme: Any, q_E: Tensor, k_E: Tensor, head: int, code_D: Tensor | None = None) -> Tensor:
    """Of one query and one key of a head, whose distance has this code; None: without positions."""
    e = len(q_E)
    if code_D is None:
        return q_E @ k_E / math.sqrt(e)
    r = (scheme.project.weight @ code_D)[head * e : (head + 1) * e]
    return ((q_E + scheme.content_bias[head]) @ k_E + (q_E + scheme.position_bias[head]) @ r) / math.sqrt(e)


def project(layer: Any, x_D: Tensor) -> list[tuple[Tensor, ...]]:
    """Query, key and value of one token, each as one vector a head."""
    return [part.chunk(HEADS) for part in layer.qkv(layer.norm(x_D)).chunk(3)]


def attended(layer: Any, x_D: Tensor, seen: Sequence[Tensor], codes: Iterable[Tensor] | None = None) -> Tensor:
    """One token's attention over others, head by head; without positions, or with the code of each distance."""
    q, pairs, heads = project(layer, x_D)[0], [project(layer, t)[1:] for t in seen], []
    given = [None] * len(pairs) if codes is None else list(codes)
    for h in range(HEADS):
        logits = [logit(layer.positions, q[h], k[h], h, code) for (k, _), code in zip(pairs, given, strict=True)]
        heads.append(torch.stack(logits).softmax(0) @ torch.stack([v[h] for _, v in pairs]))
    return layer.output(torch.cat(heads))  # type: ignore[no-any-return]


def agree(
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    leaves: nn.Module | Mapping[str, Tensor],
    *,
    atol: float = 1e-10,
    grads: float = 1e-10,
    rtol: float = 0.0,
    least: float | None = 1e-9,
) -> dict[str, Tensor]:
    """The same values, and for a weighting of them the same gradients of all leaves, which are returned.

    Args:
        atol: of the values. grads, rtol: of the gradients.
        least: every gradient is somewhere larger; None where some leaf may take no part.
    """
    named = dict(leaves.named_parameters()) if isinstance(leaves, nn.Module) else leaves
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    weights = [torch.randn_like(t) for t in want]
    found = []
    for side in (got, want):
        total = sum((t * w).sum() for t, w in zip(side, weights, strict=True))
        found.append(torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True))  # type: ignore[arg-type]
    gradients = {}
    for (name, leaf), *pair in zip(named.items(), *found, strict=True):
        a, b = (torch.zeros_like(leaf) if g is None else g for g in pair)
        torch.testing.assert_close(a, b, rtol=rtol, atol=grads, msg=lambda m, name=name: f"{name}: {m}")
        assert least is None or b.abs().max() > least, f"{name} takes no part, so that nothing is compared"
        gradients[name] = b
    return gradients


def same_states(a: Any, b: Any, atol: float = 1e-12) -> None:
    for (name, x), (_, y) in zip(states.named_tensors(a), states.named_tensors(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


class SlowMemory(LayerMemory):
    """A layer's memory by loops, with the parameters of the fast one."""

    def __init__(self, fast: Any) -> None:
        super().__init__()
        self.fast, self.needs = fast, fast.needs

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        return self.fast.init_state(batch_size, like)


def slowly(model: Any, slow: Callable[[Any], LayerMemory]) -> Any:
    """The model with a slow twin instead of each layer's memory, which the twin holds as `fast`."""
    twin = copy.deepcopy(model)
    for block in twin.stack.blocks:
        memory = block.attention.memory
        if isinstance(memory, SideBySide):  # of one that acts before the projections
            memory.members[0] = slow(memory.members[0])
        else:
            block.attention.memory = slow(memory)
    return twin


def same_as_twin(model: Any, twin: Any, segments: Sequence[Tensor], paddings: Sequence[Tensor | None]) -> None:
    """Results, states and gradients of both over some segments; padding shows nothing.

    The twin holds the memory whose parameters it uses as `fast`. Every parameter has to have a gradient.
    """
    gradients, results = [], []
    for one in (model, twin):
        outs, total, shown = run(one, segments, paddings=paddings), 0.0, []
        for out, hidden in zip(outs, paddings, strict=True):
            y = out.outputs if hidden is None else out.outputs.masked_fill(hidden[..., None], 0)
            shown.append(y)
            total = total + (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        total.backward()  # type: ignore[union-attr]
        gradients.append({k.replace(".fast.", "."): p.grad for k, p in one.named_parameters() if p.grad is not None})
        results.append([*shown, *(t for _, t in states.named_tensors(outs[-1].state))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-6, atol=1e-7, msg=name)


def recorded(shared: Path, name: str, prefix: str = "") -> dict[str, Tensor]:
    """Arrays of a file of recorded values whose names begin so, by the rest of their names."""
    with np.load(shared / "golden" / f"{name}.npz", allow_pickle=False) as file:
        return {
            k.removeprefix(prefix): torch.tensor(file[k])
            for k in file.files
            if k.startswith(prefix) and file[k].dtype.kind in "fiub"
        }
