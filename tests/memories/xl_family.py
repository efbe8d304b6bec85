"""What the tests of Transformer-XL, Segatron-XL and ERNIE-Doc share: a twin in loops, models, and a task of copying.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from memories import harness
from memories.harness import attended, build
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


def language_model(memory: Any, depth: int = 2, **options: Any) -> Any:
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "feed_forward": 2 * WIDTH}
    return build(memory, depth=depth, **{**sizes, **options})


def text(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, tokens_BN: Tensor, cuts: int | list[int], state: Any = None) -> list[ModelOutput]:
    """The model's answer to each segment, the state carried from one to the next."""
    return harness.run(model, tokens_BN.split(cuts, 1), state)


def joined(outs: list[ModelOutput]) -> Tensor:
    return torch.cat([out.outputs for out in outs], 1)


def one_token(block: Block, x: Tensor, place: Place, seen: Sequence[tuple[Tensor, Place]], code: Code) -> Tensor:
    """A pre-norm block's output for one token, given all it sees (itself included), one head and key at a time."""
    y = x + attended(block.attention, x, [hidden for hidden, _ in seen], (code(place, there) for _, there in seen))
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


def copying(memory: Any, steps: int, *, symbols: int = 6) -> float:
    """Accuracy on a segment that is the one before it again, after training whose gradient crosses no segment.

    Without a memory nothing is copied, as the test of Transformer-XL sees.
    """
    task = Copy(symbols=symbols)
    model = trained(task, memory, steps, distance=1, bptt=1, depth=2, model={} if memory else {"positions": "relative"})
    return accuracy(model, task, 1)
