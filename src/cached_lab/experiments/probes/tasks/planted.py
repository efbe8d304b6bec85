"""Tasks with statements at random places of a long noise and the question at the end.

A segment is divided into cells as wide as a statement; the rest after the last cell holds noise only. So a statement
never crosses a segment boundary, and every cell except those of the last segment may hold one.

Legend: B rows, L tokens of a segment, K statements, W tokens of a statement, Q tokens of the ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from .base import IGNORED, Episode, StreamedTask, asked_at_end, nothing_asked


class PlantingPlan(NamedTuple):
    """Everything sampled before the first segment of an episode.

    Attributes:
        cells_BK: cells of the statements, counted from the first segment. statements_BKW: their tokens.
        ending_BQ: the last tokens of the episode. answers_BQ: their targets.
        background: returns the next segment without its statements, (B, L).
    """

    cells_BK: Tensor
    statements_BKW: Tensor
    ending_BQ: Tensor
    answers_BQ: Tensor
    background: Callable[[], Tensor]


class PlantedTask(StreamedTask):
    """Base of the tasks.

    Attributes:
        width: W. per_segment: cells of a segment.
    """

    width: int
    per_segment: int

    def _cells(self, segment: int, width: int, ending: int) -> None:
        """Store the sizes.

        Raises:
            ValueError: the segment is shorter than a statement or the ending.
        """
        least = max(width, ending)
        if segment < least:
            raise ValueError(
                f"segment={segment} must hold a statement of {width} tokens, and a question with its answers of "
                f"{ending}; take at least {least}"
            )
        self.segment, self.width, self.per_segment = segment, width, segment // width

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        raise NotImplementedError("abstract: a task writes _plan()")

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        plan = self._plan(rows, distance, generator)
        within_W = torch.arange(self.width)
        for index in range(distance + 1):
            inputs_BL = plan.background()
            here_BK = plan.cells_BK - index * self.per_segment
            rows_I, items_I = ((here_BK >= 0) & (here_BK < self.per_segment)).nonzero(as_tuple=True)
            if len(rows_I):
                places_IW = here_BK[rows_I, items_I, None] * self.width + within_W
                inputs_BL[rows_I[:, None], places_IW] = plan.statements_BKW[rows_I, items_I]
            if index < distance:
                yield nothing_asked(inputs_BL)
        inputs_BL[:, -plan.ending_BQ.shape[1] :] = plan.ending_BQ
        yield asked_at_end(inputs_BL, plan.answers_BQ)


def endings(prompts_BSP: Tensor, answers_BSA: Tensor) -> tuple[Tensor, Tensor]:
    """Join questions with their answers; each token of an answer is predicted from the tokens before it.

    Args:
        prompts_BSP: S questions of P tokens. answers_BSA: their answers of A tokens; the last token is a target only.

    Returns:
        Tokens and targets, (B, S (P + A - 1)).
    """
    told_BSN = torch.cat([prompts_BSP, answers_BSA[..., :-1]], 2)
    asked_BSN = torch.full_like(told_BSN, IGNORED)
    asked_BSN[..., prompts_BSP.shape[2] - 1 :] = answers_BSA
    return told_BSN.flatten(1), asked_BSN.flatten(1)


def noise_of(rows: int, segment: int, first: int, count: int, generator: Generator) -> Callable[[], Tensor]:
    """Return a background of uniform ids `first` ... `first + count - 1`."""
    return lambda: torch.randint(first, first + count, (rows, segment), generator=generator)
