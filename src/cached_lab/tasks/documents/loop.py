"""Read documents segment by segment with a classifier, which answers at the end of each document.

Legend: B rows, N tokens of all segments, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.state import State, reorder

END = 1
"""Mark of the last token of a document; other tokens have `IGNORED`."""


class DocumentLoop(nn.Module):
    """Read documents with a memory between their segments; the gradient crosses all segments.

    DDP wraps this module: one forward for each backward, for any number of segments. Without gradients a document of
    any length takes the memory of one segment, in one pass.

    Args:
        model: a `SequenceClassifier`, or it compiled.
        segment_length: tokens in a segment.
        segments: of the longest document.
        passes: number of readings of a document, see `SegmentLoop`; the last gives the answer.
        replay: keep the activations of one segment only (`ReplayLoop`).
        memory: the state before each segment: the row's own ("carry"), none ("reset"), or that of another row
            ("shuffle"), chosen by `generator`.
    """

    def __init__(
        self,
        model: nn.Module,
        segment_length: int,
        segments: int,
        passes: int = 1,
        replay: bool = False,
        *,
        memory: str = "carry",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.memory, self.generator = memory, generator
        kind = ReplayLoop if replay else SegmentLoop
        scoring = answers if memory == "carry" else self._answers
        self.loop = kind(model, segment_length, bptt=segments, passes=passes, scoring=scoring)

    def forward(self, inputs_BN: Tensor, padding_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, K) from the last segment of each document, and the mean over segments of the auxiliary losses.

        Args:
            inputs_BN: token ids. padding_BN: bool, True = padding, after the end of a document.
        """
        if self.memory == "shuffle" and len(inputs_BN) < 2:
            raise ValueError("--memory shuffle needs two rows or more; raise training.evaluation_batch_size")
        outs = self.loop.read(inputs_BN, ends(inputs_BN, padding_BN), padding=padding_BN)
        first = next(outs)
        logits_BK, auxiliary, count = first.outputs, first.auxiliary_loss, 1
        for out in outs:  # in each row one answer is not zero
            logits_BK, auxiliary, count = logits_BK + out.outputs, auxiliary + out.auxiliary_loss, count + 1
        return logits_BK, auxiliary / count

    def _answers(
        self,
        model: nn.Module,
        inputs_BN: Tensor,
        marks_BN: Tensor,
        state: State | None,
        reset: None,
        padding_BN: Tensor | None,
    ) -> ModelOutput:
        if self.memory == "reset":
            state = None
        elif state is not None:
            rows = len(inputs_BN)
            shift = int(torch.randint(1, rows, (), generator=self.generator))
            state = reorder(state, torch.arange(rows, device=inputs_BN.device).roll(shift))
        return answers(model, inputs_BN, marks_BN, state, reset, padding_BN)


def answers(
    model: nn.Module,
    inputs_BN: Tensor,
    marks_BN: Tensor,
    state: State | None = None,
    reset: None = None,
    padding_BN: Tensor | None = None,
) -> ModelOutput:
    """One segment: logits (B, K) of the rows that end in it, zeros for other rows, and the state after it."""
    logits_BK, state, auxiliary = model(inputs_BN, state, padding=padding_BN)
    ends_B1 = (marks_BN != IGNORED).any(1, keepdim=True)
    return ModelOutput(torch.where(ends_B1, logits_BK, torch.zeros_like(logits_BK)), state, auxiliary)


def ends(inputs_BN: Tensor, padding_BN: Tensor | None) -> Tensor:
    """(B, N): `END` at the last token of each document, `IGNORED` elsewhere."""
    rows, n = inputs_BN.shape
    last_B = torch.full((rows,), n - 1, device=inputs_BN.device) if padding_BN is None else (~padding_BN).sum(1) - 1
    marks_BN = torch.full_like(inputs_BN, IGNORED)
    return marks_BN.scatter_(1, last_B[:, None], END)
