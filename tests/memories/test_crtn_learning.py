"""CRTN learns which region to recall; without its regions nothing could be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cached_transformers.models import create_model
from cached_transformers.training.segments import SegmentLoop

L = 4


def run(model: nn.Module, segments: list[Tensor], state: Any = None, paddings: Any = None) -> list[Any]:
    outs = []
    for index, segment in enumerate(segments):
        outs.append(model(segment, state, padding=None if paddings is None else paddings[index]))
        state = outs[-1].state
    return outs


SEGMENTS, SYMBOLS = 4, 4


def latch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise, one symbol somewhere in the first of four segments, asked for by the last token of the last segment."""
    x = torch.randint(SYMBOLS, SYMBOLS + 4, (rows, SEGMENTS * L), generator=generator)
    symbol = torch.randint(0, SYMBOLS, (rows,), generator=generator)
    x[torch.arange(rows), torch.randint(0, L, (rows,), generator=generator)] = symbol
    x[:, -1] = SYMBOLS + 4
    targets = torch.full_like(x, -100)
    targets[:, -1] = symbol
    return x, targets


def accuracy_after(steps: int, memory: dict[str, Any] | None) -> float:
    torch.manual_seed(0)
    sizes = {"vocabulary": SYMBOLS + 5, "width": 32, "depth": 1, "heads": 4, "feed_forward": 64, "tied": False}
    model = create_model("language_model", **sizes, memory=memory)
    loop, optimizer = SegmentLoop(model, L, bptt=SEGMENTS), torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loop(*latch(64, generator))[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    x, targets = latch(512, torch.Generator().manual_seed(9))
    with torch.no_grad():
        *_, last = run(model, list(x.split(L, 1)))
    return (last.outputs[:, -1].argmax(-1) == targets[:, -1]).double().mean().item()


BARE = {"name": "crtn", "segment": L, "regions": 3, "topk": 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scope": "token"}, {"query": "compute_first", "summary": "bilstm"}])
def test_every_kind_of_query_learns_what_to_recall(options: dict[str, Any]) -> None:
    assert accuracy_after(300, {**BARE, **options}) > 0.95


def test_it_learns_which_of_three_regions_to_recall() -> None:
    """One layer and one region at a time: the first segment must be chosen for the fourth."""
    assert accuracy_after(150, {**BARE, "rescale": True, "scale": True}) > 0.95


@pytest.mark.slow
def test_a_choice_that_nothing_trains_falls_short() -> None:
    """To the letter no gradient reaches the summary; what it picks still moves, since the embeddings learn."""
    assert 0.5 < accuracy_after(150, {**BARE, "rescale": True, "scale": True, "alpha_grad": False}) < 0.9


@pytest.mark.parametrize("memory", [None, {"name": "transformer_xl", "length": L}])
def test_without_regions_the_first_segment_is_out_of_reach(memory: dict[str, Any] | None) -> None:
    assert accuracy_after(150, memory) < 0.4
