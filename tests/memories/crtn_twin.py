"""CRTN once more, slowly: one row and one token at a time, Python lists for the store, no tensor but vectors.

Positions are those of ALiBi, which are exact in every precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Slot = tuple[Tensor, int, Any]
"""Hidden state, position, and what its value is multiplied by."""


@dataclass
class Region:
    """One segment: inputs of each layer for each token, positions, key, and what a query is made of."""

    levels: list[list[Tensor]]
    positions: list[int]
    key: Tensor
    source: list[Tensor]


@dataclass
class Row:
    """What one row remembers."""

    regions: list[Region] = field(default_factory=list)
    clock: int = 0


class Twin:
    """A language model with CRTN; `memory` is the options, written out."""

    def __init__(self, model: nn.Module, **memory: Any) -> None:
        self.model, self.o = model, memory
        self.blocks = list(model.stack.blocks)  # type: ignore[union-attr, arg-type]
        self.summary = model.stack.model_memory.summary  # type: ignore[union-attr]

    def summarise(self, tokens: list[Tensor]) -> Tensor:
        missing = self.o["segment"] - len(tokens)
        x = torch.cat([*tokens, *[torch.zeros_like(tokens[0])] * missing])
        for linear in self.summary.maps:
            x = (linear.weight @ x + linear.bias).clamp(min=0)
        return x

    def run(self, x: list[Tensor], positions: list[int], slots: Any) -> list[list[Tensor]]:
        """Levels 0 ... V of the tokens; slots(layer, token) are those that the token attends beside the segment."""
        levels = [x]
        for layer, block in enumerate(self.blocks):
            attention = block.attention
            heads, e = attention.heads, attention.width // attention.heads
            below, above = levels[-1], []

            def project(h: Tensor, attention: Any = attention) -> tuple[Tensor, Tensor, Tensor]:
                q, k, v = (attention.qkv.weight @ attention.norm(h) + attention.qkv.bias).chunk(3)
                return q, k, v

            for j, h in enumerate(below):
                q = project(h)[0]
                seen = [*slots(layer, j), *[(below[i], positions[i], 1.0) for i in range(j + 1)]]
                out = []
                for head in range(heads):
                    part = slice(head * e, (head + 1) * e)
                    slope = attention.positions.slopes[head]
                    logits, values = [], []
                    for hidden, position, weight in seen:
                        _, k, v = project(hidden)
                        logits.append(q[part] @ k[part] / math.sqrt(e) - slope * abs(positions[j] - position))
                        values.append(v[part] * weight)
                    p = torch.stack(logits).softmax(0)
                    out.append(sum(a * v for a, v in zip(p, values, strict=True)))
                y = h + attention.output.weight @ torch.cat(out) + attention.output.bias  # type: ignore[arg-type]
                above.append(y + block.feed_forward(y))
            levels.append(above)
        return levels

    def choose(self, query: Tensor, regions: list[Region]) -> list[tuple[int, Any]]:
        """Indices of the regions recalled, the best first, with their weights."""
        o = self.o
        divisor = o.get("temperature", 1.0) * (math.sqrt(len(query)) if o.get("scale") else 1)
        scores = [query @ region.key / divisor for region in regions]
        ghosts = o["regions"] - len(regions) if o.get("empty") == "compete" else 0
        alpha = list(torch.stack([*scores, *[torch.zeros_like(scores[0])] * ghosts]).softmax(0))
        # Equals: the newer first, empty ones (the oldest) last.
        best = sorted(range(len(alpha)), key=lambda i: (-alpha[i].item(), i >= len(regions), -i))[: o["topk"]]
        best = [i for i in best if i < len(regions)]
        if o.get("renormalise") == "softmax" and best:
            second = torch.stack([alpha[i] for i in best]).softmax(0)
            alpha = [second[best.index(i)] if i in best else a for i, a in enumerate(alpha)]
        if o.get("rescale"):
            alpha = [a * len(best) for a in alpha]
        if not o.get("alpha_grad", True):
            alpha = [a.detach() for a in alpha]
        return [(i, alpha[i] if o.get("weighted", True) else 1.0) for i in best]

    def segment(self, row: Row, tokens: list[int]) -> list[Tensor]:
        """Logits of one segment's tokens, and the row's store renewed."""
        o, short = self.o, self.o.get("short_memory", 0)
        if not tokens:
            return []
        x = [self.model.embedding.weight[t] for t in tokens]  # type: ignore[union-attr, index]
        positions = [row.clock + i for i in range(len(x))]
        cut = len(row.regions) - short
        choosable, recent = row.regions[: max(cut, 0)], row.regions[max(cut, 0) :]

        def always(layer: int, j: int) -> list[Slot]:
            return [(h, p, 1.0) for r in recent for h, p in zip(r.levels[layer], r.positions, strict=True)]

        source = x
        if o.get("query") == "compute_first":
            source = self.run(x, positions, always)[-1]
        before = row.regions[-1].source if row.regions else []
        chosen: list[list[tuple[int, Any]]] = []
        for j in range(len(x)):
            scope = o.get("scope", "previous")
            asked = {"previous": before, "segment": source, "token": (before + source[: j + 1])[-o["segment"] :]}[scope]
            chosen.append(self.choose(self.summarise(asked), choosable) if choosable else [])

        def slots(layer: int, j: int) -> list[Slot]:
            picked = sorted(chosen[j], key=lambda pair: pair[0])
            got = []
            for i, weight in picked:
                region = choosable[i]
                got += [(h, p, weight) for h, p in zip(region.levels[layer], region.positions, strict=True)]
            got += always(layer, j)
            if o.get("placed") == "packed":
                first = positions[0] - len(got)
                got = [(h, first + place, weight) for place, (h, _, weight) in enumerate(got)]
            return got

        levels = self.run(x, positions, slots)
        kept = [[h.detach() for h in level] for level in levels[:-1]]
        row.regions.append(Region(kept, positions, self.summarise(levels[-1]), source))
        row.regions = row.regions[-(o["regions"] + short) :]
        row.clock += len(x)
        norm, head = self.model.stack.norm, self.model.head  # type: ignore[union-attr]
        return [head.weight @ norm(h) for h in levels[-1]]  # type: ignore[union-attr, operator]
