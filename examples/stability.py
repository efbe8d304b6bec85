"""Numerical stability of states that sum many small steps, on long streams made to break them.

    python examples/stability.py --tokens 65536 --seeds 3

Each layer processes five streams in parallel: three repeated tokens, random tokens, both a thousand times as large, and
random tokens whose scale changes every 64 tokens. Learning rates are at their bounds, and nothing is forgotten. The
result is the root mean square of a row's state, the largest over streams and seeds: it has to be finite, and to stop
growing. The input is not normalised, as it would be in a model.

Legend: B streams, N tokens, D width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_lab.experiments.environment import environment, machine
from cached_lab.experiments.reports.markdown import table
from cached_transformers.attentions import create_attention
from cached_transformers.interfaces.memory import LayerMemory, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories import create_memory
from cached_transformers.state import named_tensors

WIDTH, HEADS, SEGMENT = 16, 2, 256
PLACES = (1 / 16, 1 / 4, 1 / 2, 1)
"""Shares of the stream after which a state is measured."""


def _titans(layer: SelfAttention) -> None:
    """Set the largest learning rate, no forgetting, and a momentum of 0.99."""
    gate = layer.memory.gate
    assert isinstance(gate, nn.Linear)
    nn.init.zeros_(gate.weight)
    gate.bias.copy_(torch.tensor([50.0, -50.0, 4.6]).repeat_interleave(len(gate.bias) // 3))


def _ttt(layer: SelfAttention) -> None:
    """Set every rate to its bound."""
    step = layer.memory.step
    assert isinstance(step, nn.Linear)
    nn.init.zeros_(step.weight)
    nn.init.constant_(step.bias, 50.0)


def _keep(layer: SelfAttention) -> None:
    """Change nothing: the write strength of a delta rule is 0 or 1 for large inputs by itself."""


class StabilityCase(NamedTuple):
    """A memory or attention with a state, its options, and a function that moves its rates to their bounds."""

    name: str
    options: Mapping[str, Any]
    push: Callable[[SelfAttention], None] = _keep
    core: bool = False

    @property
    def title(self) -> str:
        """The name with the options."""
        return ", ".join([f"`{self.name}`", *(f"{key}={value}" for key, value in self.options.items())])

    def build(self) -> SelfAttention:
        """Build a layer with the memory or attention."""
        facts: dict[str, Any] = {"width": WIDTH, "heads": HEADS}
        if self.core:
            core = create_attention({"name": self.name, "carry": True, **self.options}, **facts)
            layer = SelfAttention(WIDTH, HEADS, core=core, causal=True)
        else:
            memory = create_memory({"name": self.name, **self.options}, WIDTH, HEADS, causal=True)
            assert isinstance(memory, LayerMemory)
            layer = SelfAttention(WIDTH, HEADS, memory=memory, causal=True)
        with torch.no_grad():
            self.push(layer)
        return layer.eval()


CASES = (
    StabilityCase("titans", {}, _titans),
    StabilityCase("titans", {"layers": 2}, _titans),
    StabilityCase("titans", {"chunk": 64}, _titans),
    StabilityCase("ttt", {}, _ttt),
    StabilityCase("ttt", {"model": "mlp"}, _ttt),
    StabilityCase("lact", {}),
    StabilityCase("gated_delta", {"decay": "none"}, core=True),
    StabilityCase("gated_delta", {"decay": "none", "negative_eigenvalues": True}, core=True),
    StabilityCase("delta_net", {}, core=True),
)
"""Memories and attentions that learn or correct at test time."""


def streams(tokens: int, seed: int) -> Tensor:
    """Return the five streams (5, N, D)."""
    new_ND = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    few_ND = new_ND[:3].repeat(-(-tokens // 3), 1)[:tokens]
    turns_N1 = 1 + 999 * (torch.arange(tokens) // 64 % 2)[:, None]
    return torch.stack([few_ND, 1000 * few_ND, new_ND, 1000 * new_ND, turns_N1 * new_ND])


@torch.no_grad()
def sizes_of(case: StabilityCase, tokens: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return the root mean square (segments, B) of each stream's state after each segment; infinite once broken."""
    torch.manual_seed(seed)
    layer = case.build().to(dtype)
    x_BND = streams(tokens, seed).to(dtype)
    state, found = layer.init_state(len(x_BND), x_BND), []
    for segment_BND in x_BND.split(SEGMENT, 1):
        seen = layer(segment_BND, state=state)
        state = layer.write(state, Trace(segment_BND, seen.y_BND, seen.query, seen.reading), seen.core_state)[0]
        carried_BP = torch.cat([t.flatten(1).double() for _, t in named_tensors(state) if t.is_floating_point()], 1)
        size_B = carried_BP.square().mean(1).sqrt()
        there_B = size_B.isfinite() & seen.y_BND.isfinite().all((1, 2))
        found.append(torch.where(there_B, size_B, math.inf))
    return torch.stack(found)


def measure(case: StabilityCase, tokens: int, seeds: int, dtype: torch.dtype) -> list[float]:
    """Return the largest root mean square over streams and seeds at each of `PLACES`, and anywhere."""
    sizes_RSB = torch.stack([sizes_of(case, tokens, seed, dtype) for seed in range(seeds)])
    largest_S = sizes_RSB.amax((0, 2))
    return [*(float(largest_S[max(0, int(len(largest_S) * share) - 1)]) for share in PLACES), float(largest_S.max())]


def as_markdown(rows: Sequence[tuple[StabilityCase, str, list[float]]], tokens: int) -> str:
    """Write a row for each case and dtype."""
    head = ["carried by", "dtype", *(f"after {int(tokens * share):,} tokens" for share in PLACES), "largest"]
    return table(head, [[case.title, dtype, *(f"{size:.3g}" for size in found)] for case, dtype, found in rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table.

    Raises:
        ValueError: less than a segment of tokens, or no seed.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=65536, help="of each stream (default: 65536)")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    given = parser.parse_args(arguments)
    if given.tokens < SEGMENT or given.seeds < 1:
        raise ValueError(f"--tokens {given.tokens} --seeds {given.seeds}: take at least {SEGMENT} tokens and one seed")
    rows = []
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append((case, str(dtype).removeprefix("torch."), measure(case, given.tokens, given.seeds, dtype)))
            print(rows[-1][0].title, *rows[-1][1:], flush=True)
    about = environment("cpu")
    print(f"\n{as_markdown(rows, given.tokens)}\n\n{machine()}; torch {about['torch']}, commit {about['commit']}")


if __name__ == "__main__":
    main()
