"""Training over segments: the state crosses all segments of a batch, the gradient crosses `bptt` of them.

DDP and FSDP wrap the loop, not the model inside: for any number of segments the wrapper sees one forward per backward.

Legend: B rows, N tokens of all segments, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from cached_transformers.annotations import checked
from cached_transformers.checks import at_least_one
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.memories.parts.late_gradients import late_gradients
from cached_transformers.models.diagonal import check_schedule, read_diagonally
from cached_transformers.models.documents import (
    check_documents,
    check_suits,
    ids_of,
    plan_documents,
    read_documents,
    refuse_documents,
    resets_between,
)
from cached_transformers.models.inputs import check_padding, check_places, check_targets, shape_of
from cached_transformers.models.segments import (
    begun,
    cut,
    for_loops,
    model_memory,
    read_earlier_passes,
    read_segments,
    remembers,
)
from cached_transformers.models.untrained import OneSegmentSteps
from cached_transformers.registry import unknown_name
from cached_transformers.state import State, detach

from .distillation import Teacher, TeacherAnswers
from .sliding import WINDOWS, read_sliding


class SegmentPiece(NamedTuple):
    """One segment of a batch: inputs, targets, padding, numbers of sentences and paragraphs, ids of documents, and the
    answers of a teacher."""

    inputs_BN: Tensor
    targets_BN: Tensor
    padding_BN: Tensor | None = None
    places_BN2: Tensor | None = None
    documents_BN: Tensor | None = None
    answers: TeacherAnswers | None = None


@checked
class SegmentLoop(nn.Module):
    """Run a model over the segments of a batch and return one loss (truncated backpropagation through time).

    Args:
        model: called as `model(inputs, state, reset=..., padding=...)`, returns a `ModelOutput` with logits (B, n, V);
            or a model of transformers or timm to which `add_memory` gave a memory with a state: a decoder, an encoder
            with one output per token, or an image classifier, which reads videos.
        segment_length: tokens in a segment; the last one may be shorter. For videos, frames that one graph covers: each
            frame is a segment to the memory.
        bptt: segments that a gradient may cross. The state is detached after every `bptt` segments and at the end.
        passes: number of passes over the batch. The model memory's `next_pass` makes the first state of the next pass;
            the loss is the loss of the last pass. By then a memory has read all inputs, so the targets must not be
            among them (no next-token loss or perplexity), unless the memory has `rereads`. The loop cannot check this.
            The gradient crosses passes if `bptt` covers all segments of the batch.
        schedule: "segments", one after the other; or "diagonal", where layers work on different segments at once, with
            the same loss, state and gradients (`models/diagonal.py`), for one pass of models whose memory is in the
            layers.
        scoring: replaces `token_losses`, with its arguments; `read` yields its outputs, `forward` needs token losses.
        bptt_window: "blocks": the state is detached after every `bptt` segments, so the last segment of a block gets no
            gradient from later losses. "sliding": each loss reaches back through `bptt` segments, including its own, as
            far as the batch goes (`loops/sliding.py`). Both are equal for bptt=1 and where bptt covers the batch.
        teacher: sees the whole batch; `forward` trains the model to predict as it does (`loops/distillation.py`), and
            `read` gives token losses as ever.

    Attributes:
        auxiliary_loss: auxiliary part of the last loss, detached.

    Raises:
        ValueError: a size below 1, several passes over a model without a stack, a model of transformers without a
            memory, a schedule that does not fit the model; a sliding window with passes, a diagonal or a compiled
            model; or a teacher of another vocabulary, or beside passes, scoring or a diagonal.

    Example:
        >>> loop = SegmentLoop(model, segment_length=512, bptt=2)
        >>> loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        segment_length: int,
        bptt: int = 1,
        passes: int = 1,
        schedule: str = "segments",
        scoring: Callable[..., ModelOutput] | None = None,
        bptt_window: str = "blocks",
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        at_least_one(segment_length=segment_length, bptt=bptt, passes=passes)
        model = for_loops(model)
        if passes > 1:
            model_memory(model, passes)
            if schedule == "diagonal":
                raise ValueError(
                    f"passes={passes} need a memory that spans the layers; take schedule='segments', or passes=1"
                )
        check_schedule(schedule, model)
        if schedule == "diagonal" and type(self)._segment is not SegmentLoop._segment:
            raise ValueError(f"schedule='diagonal': {type(self).__name__} runs one segment at a time; take SegmentLoop")
        if schedule == "diagonal" and scoring is not None:
            raise ValueError("schedule='diagonal' scores tokens itself; leave scoring out, or take 'segments'")
        if bptt_window not in WINDOWS:
            raise ValueError(unknown_name("bptt_window", bptt_window, list(WINDOWS)))
        if bptt_window == "sliding":
            _check_sliding(model, bptt, passes, schedule)
        if teacher is not None:
            for name, value, plain in (
                ("passes", passes, 1),
                ("schedule", schedule, "segments"),
                ("scoring", scoring, None),
            ):
                if value != plain:
                    raise ValueError(
                        f"{name}={value!r} beside a teacher, which has losses of its own; take {name}={plain}"
                    )
            teacher.check(model)
        self.bptt_window, self.teacher = bptt_window, teacher
        self.model, self.segment_length, self.bptt, self.passes = model, segment_length, bptt, passes
        self.schedule, self.scoring = schedule, token_losses if scoring is None else scoring
        self.auxiliary_loss = torch.zeros(())
        self._steps = OneSegmentSteps()

    def forward(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        places: Tensor | None = None,
        documents: Tensor | None = None,
        answers: TeacherAnswers | None = None,
    ) -> tuple[Tensor, State]:
        """The loss of the batch, and the detached state after it.

        Args:
            inputs_BN: token ids; or videos, (B, N, channels, height, width).
            targets_BN: target at each position; -100 has no loss.
            state: state after the last batch; None for the start of streams.
            reset: bool, rows that begin a new document at the first token of this batch, (B,), or at the first token
                of each of its first S segments, (B, S).
            padding: (B, N) bool, True = padding, which has no loss and is not stored.
            places: (B, N, 2) numbers of sentences and paragraphs, for a model that takes them (`LanguageModel`).
            documents: (B, N) ids of the documents packed into a row, negative at padding, unique within the batch. Each
                is read as in a row of its own (`models/documents.py`): the first document of a row continues the row's
                state, unless it is reset; each further one begins with a fresh state. The target of a document's last
                token must not be the next document's first token. CPU ids avoid a wait for the device. The model may be
                compiled, the loop not.
            answers: of the teacher, for this batch, if they are known already.

        Returns:
            Mean cross-entropy (nats) over all tokens with a target, or mean loss of the teacher, 0 if there is none,
            plus the mean over segments of the auxiliary losses; and the state.

        Raises:
            ValueError: no token; mismatched shapes; more resets than segments, or several with several passes; a
                document that begins twice in its row; documents with several passes, a model with one output per row, a
                memory shared by all rows in training, or inside a segment of a diagonal schedule; documents, places,
                or rows of several texts beside a teacher, or answers without one.
        """
        _check_shapes(inputs_BN, targets_BN, padding)
        if self.teacher is not None:
            if documents is not None or places is not None:
                raise ValueError("a teacher reads each row as one text; leave documents and places out")
            self.teacher.check_rows(padding, reset)
            if answers is None:
                answers = self.teacher.answers(inputs_BN, targets_BN, self.segment_length)
        elif answers is not None:
            raise ValueError("answers are those of a teacher, and the loop has none; give it teacher=Teacher(...)")
        if documents is not None:
            documents, padding = told_documents(documents, padding, inputs_BN)
        told = padding if documents is None else None  # the ids hold the padding, on the CPU
        batch = SegmentPiece(inputs_BN, targets_BN, told, places, documents, answers)
        with late_gradients(segments=True):
            outs = list(self._read(batch, state, reset))
        total = auxiliary = inputs_BN.new_zeros((), dtype=torch.float32)
        for out in outs:
            total = total + out.outputs.sum()
            auxiliary = auxiliary + out.auxiliary_loss
        if padding is not None:
            targets_BN = targets_BN.masked_fill(padding, IGNORED)
        count = (targets_BN != IGNORED).sum().clamp(min=1)
        auxiliary = auxiliary / len(outs)
        self.auxiliary_loss = auxiliary.detach()
        return total / count + auxiliary, detach(outs[-1].state)

    def read(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        places: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Iterator[ModelOutput]:
        """Yield each segment of the last pass: losses (B, n), state after it, auxiliary loss.

        Arguments and errors as in `forward`.
        """
        return self._read(SegmentPiece(inputs_BN, targets_BN, padding, places, documents), state, reset)

    def _read(self, batch: SegmentPiece, state: State | None, reset: Tensor | None) -> Iterator[ModelOutput]:
        inputs_BN, places = batch.inputs_BN, batch.places_BN2
        pieces, resets = self._prepared(batch, reset)
        alone = state is None and len(pieces) == self.passes == 1 and inputs_BN.dim() == 2
        if not alone or remembers(self.model.init_state(1)):  # type: ignore[operator]
            self._steps.step(self.model, self.segment_length, inputs_BN.shape[1], alone)
        if self.passes > 1:
            state, resets = self._earlier_passes(pieces, state, reset), []
        if self.schedule == "diagonal":
            _refuse_inside(pieces)
            if places is not None:
                raise ValueError("schedule='diagonal' takes no places; leave them out, or take schedule='segments'")
            return read_diagonally(self.model, [piece[:3] for piece in pieces], state, resets, self.bptt)
        if self.bptt_window == "sliding" and 1 < self.bptt < len(pieces) and torch.is_grad_enabled():
            self._refuse_shards()
            return read_sliding(self._segment, pieces, state, resets, self.bptt)
        return read_segments(self._segment, pieces, state, resets, self.bptt)

    def earlier_passes(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> State:
        """Run all passes but the last and return the first state of the last one, after resets."""
        return self._earlier_passes(self._pieces(SegmentPiece(inputs_BN, targets_BN, padding)), state, reset)

    def _earlier_passes(self, pieces: list[SegmentPiece], state: State | None, reset: Tensor | None) -> State:
        state = begun(self.model, state, None if reset is None else reset.flatten(), len(pieces[0].inputs_BN))
        if self.passes == 1:
            return state
        next_pass = model_memory(self.model, self.passes).next_pass
        return read_earlier_passes(self._segment, pieces, state, next_pass, self.passes, self.bptt)

    def _prepared(self, batch: SegmentPiece, reset: Tensor | None) -> tuple[list[SegmentPiece], list[Tensor | None]]:
        """The segments of a batch, and the rows to reset before the first of them."""
        inputs_BN, targets_BN, padding, places, documents = batch[:5]
        _check_shapes(inputs_BN, targets_BN, padding)
        if places is not None:
            check_places(places, inputs_BN)
        resets: list[Tensor | None] = [] if reset is None else self._resets(reset, *inputs_BN.shape[:2])
        if documents is not None:
            if self.passes > 1:
                refuse_documents(documents, f"passes={self.passes} begin again with all inputs of a row")
            check_suits(self.model)
            documents, padding = told_documents(documents, padding, inputs_BN)
            given, device = resets, inputs_BN.device
            between = resets_between(documents, cut(inputs_BN.shape[1], self.segment_length))
            resets = [None if rows_B is None else rows_B.to(device, non_blocking=True) for rows_B in between]
            for index, rows_B in enumerate(given):
                found = resets[index]
                resets[index] = rows_B if found is None or rows_B is None else rows_B | found
        return self._pieces(batch._replace(padding_BN=padding, documents_BN=documents)), resets

    def _pieces(self, batch: SegmentPiece) -> list[SegmentPiece]:
        if batch.padding_BN is not None:
            batch = batch._replace(targets_BN=batch.targets_BN.masked_fill(batch.padding_BN, IGNORED))
        parts = cut(batch.inputs_BN.shape[1], self.segment_length)
        return [tree_map_only(Tensor, itemgetter((slice(None), part)), batch) for part in parts]

    def _resets(self, reset: Tensor, rows: int, tokens: int) -> list[Tensor | None]:
        shape = shape_of("reset", reset)
        if len(shape) not in (1, 2) or shape[0] != rows or reset.dtype != torch.bool:
            raise ValueError(f"reset of shape {shape} and {reset.dtype} must be bool, of {rows} rows")
        count = 1 if len(shape) == 1 else shape[1]
        most = 1 if self.passes > 1 else -(-tokens // self.segment_length)
        if count > most:
            raise ValueError(
                f"resets at {count} segments of a batch of {tokens} tokens; passes={self.passes} over segments of "
                f"{self.segment_length} tokens can have {most}"
            )
        return list(reset.view(rows, -1).unbind(1))

    def _refuse_shards(self) -> None:
        """Refuse (ValueError) FSDP inside the loop, whose hooks scatter gradients at the first backward of a block."""
        marks = ("set_reshard_after_backward", "_fsdp_wrapped_module")  # of fully_shard, of FullyShardedDataParallel
        sharded = [name for name, module in self.model.named_modules() if any(hasattr(module, m) for m in marks)]
        if sharded:
            raise ValueError(
                f"bptt_window='sliding' goes back through a segment several times, but FSDP wraps parts of the model "
                f"({sharded[0] or 'the model'}) and scatters gradients the first time; wrap only the loop, or take "
                "bptt_window='blocks'"
            )

    def _segment(self, piece: SegmentPiece, state: State | None, reset_B: Tensor | None) -> ModelOutput:
        """Score one segment."""
        inputs_BN, targets_BN, padding_BN, places_BN2, documents_BN, answers = piece
        if answers is not None:
            assert self.teacher is not None
            return self.teacher.losses(self.model, inputs_BN, targets_BN, answers, state, reset_B, padding_BN)

        def score(
            inputs_BN: Tensor,
            targets_BN: Tensor,
            places_BN2: Tensor | None,
            state: State | None,
            padding_BN: Tensor | None,
            reset_B: Tensor | None = None,
        ) -> ModelOutput:
            more = () if places_BN2 is None else (places_BN2,)
            return self.scoring(self.model, inputs_BN, targets_BN, state, reset_B, padding_BN, *more)

        if documents_BN is None:
            return score(inputs_BN, targets_BN, places_BN2, state, padding_BN, reset_B)
        state, given = begun(self.model, state, reset_B, len(inputs_BN)), (inputs_BN, targets_BN, places_BN2)
        return read_documents(score, documents_BN, None, given, state, self.model.init_state)  # type: ignore[arg-type]


def token_losses(
    model: nn.Module,
    inputs_BN: Tensor,
    targets_BN: Tensor,
    state: State | None = None,
    reset: Tensor | None = None,
    padding: Tensor | None = None,
    places: Tensor | None = None,
) -> ModelOutput:
    """Cross-entropy (B, N) in nats of every token of one segment, with the state after it.

    Float32 or wider, since half precision cannot add thousands of terms; 0 where the target is -100. A model with
    `scores_targets = True` computes the losses itself (`targets=`), without all logits.
    """
    start: dict[str, Any] = {} if reset is None else {"reset": reset}
    if places is not None:
        start["places"] = places
    if getattr(model, "scores_targets", False):
        return model(inputs_BN, state, padding=padding, targets=targets_BN, **start)
    logits_BNV, state, auxiliary = model(inputs_BN, state, padding=padding, **start)
    check_targets(targets_BN, logits_BNV[..., 0], logits_BNV.shape[-1])
    wide = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), targets_BN.flatten(), ignore_index=IGNORED, reduction="none")
    return ModelOutput(losses.view_as(targets_BN), state, auxiliary)


def _check_sliding(model: nn.Module, bptt: int, passes: int, schedule: str) -> None:
    for name, value, plain in (("passes", passes, 1), ("schedule", schedule, "segments")):
        if value != plain:
            raise ValueError(
                f"bptt_window='sliding' is for one pass, segment after segment; take {name}={plain!r}, not {value!r}, "
                "or bptt_window='blocks'"
            )
    if bptt > 1 and hasattr(model, "_orig_mod"):
        raise ValueError(
            "bptt_window='sliding' goes back through a segment several times, but a compiled model frees its graph the "
            "first time; give the loop the uncompiled model, or take bptt_window='blocks'"
        )


def told_documents(documents: Tensor, padding: Tensor | None, inputs_BN: Tensor) -> tuple[Tensor, Tensor | None]:
    """Combine document ids and padding: ids that are negative at padding, and the mask of negative ids or None."""
    check_documents(documents, *inputs_BN.shape[:2])
    ids_BN = ids_of(documents, padding)
    padding_BN = ids_BN < 0
    return ids_BN, padding_BN.to(inputs_BN.device) if bool(padding_BN.any()) else None


def _refuse_inside(pieces: list[SegmentPiece]) -> None:
    """Refuse (ValueError) documents that do not begin with a segment."""
    for index, piece in enumerate(pieces):
        if piece.documents_BN is not None and plan_documents(piece.documents_BN) is not None:
            raise ValueError(
                f"schedule='diagonal' reads whole segments, but in segment {index} of the batch a document begins "
                "after a row's first token or after padding; take schedule='segments', or begin documents with "
                "segments and pad on the right"
            )


def _check_shapes(inputs_BN: Tensor, targets_BN: Tensor, padding_BN: Tensor | None) -> None:
    shape = shape_of("inputs", inputs_BN)
    if len(shape) not in (2, 5) or 0 in shape[:2]:
        raise ValueError(
            f"inputs of shape {shape} must be (rows, tokens) with at least one token, or videos "
            "(rows, frames, channels, height, width)"
        )
    if shape_of("targets", targets_BN) != shape[:2]:
        raise ValueError(f"targets of shape {tuple(targets_BN.shape)} must have the shape of the inputs, {shape[:2]}")
    if padding_BN is not None:
        check_padding(padding_BN, targets_BN)
