"""What the tests of Transformer-XL, Segatron-XL and ERNIE-Doc share: a twin in loops, models, and a task of copying.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from memories.learning import accuracy, trained
from torch import Tensor, nn

from cached_lab.experiments.probes.tasks import Copy
from cached_transformers.layers.block import Block
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.models.language_model import LanguageModel

Place = tuple[int, ...]
"""Where a token stands: one number, or token, sentence and paragraph."""
Code = Callable[[Place, Place], Tensor]
"""The vector R of a query's and a key's place."""

VOCABULARY, WIDTH, HEADS = 13, 12, 2


def language_model(memory: Any, depth: int = 2, **options: Any) -> LanguageModel:
    """A small float64 model none of whose parameters keeps an initial value that would hide its effect."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"width": WIDTH, "heads": HEADS, "feed_forward": 2 * WIDTH, **options}
    model = LanguageModel(VOCABULARY, depth=depth, memory=memory, **sizes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def text(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, tokens_BN: Tensor, cuts: int | list[int], state: Any = None) -> list[ModelOutput]:
    """The model's answer to each segment, the state carried from one to the next."""
    outs = []
    for segment in tokens_BN.split(cuts, 1):
        outs.append(model(segment, state))
        state = outs[-1].state
    return outs


def joined(outs: list[ModelOutput]) -> Tensor:
    return torch.cat([out.outputs for out in outs], 1)


def sines(distance: int, width: int) -> Tensor:
    """Transformer-XL's code of a distance: all sines, then all cosines."""
    angle = [distance * 10000 ** (-2 * k / width) for k in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angle] + [math.cos(a) for a in angle], dtype=torch.double)


def one_token(block: Block, x: Tensor, place: Place, seen: Sequence[tuple[Tensor, Place]], code: Code) -> Tensor:
    """A pre-norm block's output for one token, given all it sees (itself included), one head and key at a time."""
    layer: Any = block.attention
    scheme, d, heads = layer.positions, layer.width, layer.heads
    e = d // heads
    weight, bias = layer.qkv.weight, layer.qkv.bias
    out = []
    for h in range(heads):
        part = slice(h * e, (h + 1) * e)
        q = (weight[:d] @ layer.norm(x) + bias[:d])[part]
        logits, values = [], []
        for hidden, there in seen:
            k = (weight[d : 2 * d] @ layer.norm(hidden) + bias[d : 2 * d])[part]
            r = (scheme.project.weight @ code(place, there))[part]
            logits.append(((q + scheme.content_bias[h]) @ k + (q + scheme.position_bias[h]) @ r) / math.sqrt(e))
            values.append((weight[2 * d :] @ layer.norm(hidden) + bias[2 * d :])[part])
        share = torch.stack(logits).softmax(0)
        out.append(torch.stack([a * v for a, v in zip(share, values, strict=True)]).sum(0))
    y = x + layer.output(torch.cat(out))
    return y + block.feed_forward(y)


def twin(
    model: LanguageModel,
    tokens: list[int],
    places: Sequence[Place],
    segment: int,
    length: int,
    code: Code,
    *,
    keep: str = "input",
    window: int | None = None,
    start: Sequence[tuple[Tensor, Place]] = (),
) -> Tensor:
    """(N, V): logits of one row, one token at a time. `keep` says what of a layer its memory stores."""
    blocks: list[Any] = list(model.stack.blocks)
    memories = [list(start) for _ in blocks]
    logits = []
    for first in range(0, len(tokens), segment):
        x = [model.embedding.weight[t] for t in tokens[first : first + segment]]
        where = places[first : first + segment]
        for index, block in enumerate(blocks):
            known = [*memories[index], *zip(x, where, strict=True)]
            y = []
            for i in range(len(x)):
                seen = known[: len(memories[index]) + i + 1]
                y.append(one_token(block, x[i], where[i], seen if window is None else seen[-window:], code))
            stored = x if keep == "input" else y
            memories[index] += [(t.detach(), p) for t, p in zip(stored, where, strict=True)]
            memories[index] = memories[index][-length:]
            x = y
        logits += [model.head(model.stack.norm(t)) for t in x]
    return torch.stack(logits)


def assert_equal_values_and_gradients(model: nn.Module, ours: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """The same numbers, and the same gradient of every parameter for a random weighting of them."""
    torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)
    weighting = torch.randn(ours.shape, dtype=ours.dtype)
    names = [name for name, _ in model.named_parameters()]
    grads = [torch.autograd.grad((t * weighting).sum(), list(model.parameters())) for t in (ours, wanted)]
    for name, a, b in zip(names, *grads, strict=True):
        assert b.abs().max() > 1e-6, f"{name} takes no part, so that the comparison says nothing about it"
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def copying(memory: Any, steps: int, *, symbols: int = 6) -> float:
    """Accuracy on a segment that is the one before it again, after training whose gradient crosses no segment.

    Without a memory nothing is copied, as the test of Transformer-XL sees.
    """
    task = Copy(symbols=symbols)
    model = trained(task, memory, steps, distance=1, bptt=1, depth=2, model={} if memory else {"positions": "relative"})
    return accuracy(model, task, 1)
