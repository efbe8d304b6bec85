"""Training over segments: a batch is cut into segments, the state crosses all of them, the gradient `bptt` of them.

The loop is the module that DDP and FSDP wrap, not the model inside: whatever the number of segments, the wrapper sees
one forward for each backward.

Legend: B rows, N tokens of all segments, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
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
from cached_transformers.models.inputs import check_places
from cached_transformers.models.segments import (
    begun,
    cut,
    for_loops,
    model_memory,
    read_earlier_passes,
    read_segments,
)
from cached_transformers.registry import unknown_name
from cached_transformers.state import State, detach

from .sliding import WINDOWS, read_sliding

Piece: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Inputs, targets and padding of a segment, (B, n) each, what numbers sentences and paragraphs have, (B, n, 2), and ids
of documents, (B, n)."""


class SegmentLoop(nn.Module):
    """Runs a model over the segments of a batch and returns one loss (truncated backpropagation through time).

    Args:
        model: called as `model(inputs, state, reset=..., padding=...)`, gives a `ModelOutput` with logits (B, n, V); or
            a model of transformers or timm that `add_memory` gave a memory with a state: a decoder, an encoder that
            answers for each token, or a classifier of images, which reads videos.
        segment_length: tokens in a segment; the last one may be shorter. Of videos, frames between which nothing cuts
            the graph: each is a segment to the memory.
        bptt: segments that a gradient may cross. The state is cut after every `bptt` segments and at the end.
        passes: how often the batch is run through. Between two passes the model memory's `next_pass` says with which
            state the next one begins; the loss is that of the last pass. In it a memory has read all inputs, so that
            targets must not be among them (classes, tags, answers): no next-token loss and no perplexity, unless the
            memory says `rereads`. The loop cannot know what the targets are, and does not ask. The gradient crosses
            from pass to pass where `bptt` covers all segments of the batch.
        schedule: "segments", one after the other; or "diagonal", where layers work on different segments at once, with
            the same loss, state and gradients (`models/diagonal.py`): for our models whose memory lives in the layers,
            and one pass.
        scoring: what is made of a segment, called as `token_losses`; what `read` yields are its outputs. `forward` is
            for losses of tokens.
        bptt_window: "blocks", where the state is cut after every `bptt` segments, so that the last segment of a block
            hears of no later loss; or "sliding", where the loss of every segment reaches back through `bptt` segments,
            its own included, as far as the batch goes (`training/sliding.py` says what it costs). They are the same
            for bptt=1, and where it covers the batch.

    Attributes:
        auxiliary_loss: what the last loss held beside the cross-entropy, detached.

    Raises:
        ValueError: a size below 1, several passes over a model without a stack, a model of transformers alone, a
            schedule that does not suit the model, or a sliding window with what it does not go with.

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
    ) -> None:
        super().__init__()
        for name, value in {"segment_length": segment_length, "bptt": bptt, "passes": passes}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        model = for_loops(model)
        if passes > 1:
            model_memory(model, passes)
            if schedule == "diagonal":
                raise ValueError(
                    f"passes={passes} begin with what a memory that spans the layers makes of all states; take "
                    "schedule='segments', or passes=1"
                )
        check_schedule(schedule, model)
        if schedule == "diagonal" and scoring is not None:
            raise ValueError("schedule='diagonal' scores tokens by itself; leave scoring out, or take 'segments'")
        if bptt_window not in WINDOWS:
            raise ValueError(unknown_name("bptt_window", bptt_window, list(WINDOWS)))
        if bptt_window == "sliding":
            _check_sliding(model, bptt, passes, schedule)
        self.bptt_window = bptt_window
        self.model, self.segment_length, self.bptt, self.passes = model, segment_length, bptt, passes
        self.schedule, self.scoring = schedule, token_losses if scoring is None else scoring
        self.auxiliary_loss = torch.zeros(())

    def forward(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        places: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The loss of the batch, and the state after it, cut from the graph.

        Args:
            inputs_BN: token ids; or videos, (B, N, channels, height, width).
            targets_BN: what each place is to be answered with; -100 takes no part.
            state: state after the last batch; None for the start of streams.
            reset: bool, rows that begin a new document at the first token of this batch, (B,), or at the first token
                of each of its first S segments, (B, S).
            padding: (B, N) bool, True = padding, which takes no part in the loss and is not remembered.
            places: (B, N, 2) numbers of sentences and paragraphs, for a model that takes them (`LanguageModel`).
            documents: (B, N) ids of the documents that a row holds one behind the other, negative at padding; names
                within this batch. Each is read as in a row of its own (`models/documents.py`): a row's first one goes
                on with the row's state, unless it is reset, and every further one begins with a fresh state, in the
                middle of a segment or not. Targets are the caller's: that of a document's last token is no token of
                the next one. On the CPU they keep no device waiting. The model may be compiled, the loop not.

        Returns:
            Mean cross-entropy (nats) over all tokens that take part, 0 if there is none, plus the mean over segments of
            the auxiliary losses; and the state. One backward gives the gradient of every window of `bptt` segments.

        Raises:
            ValueError: there is no token, the shapes of inputs, targets and padding differ, or there are more resets
                than segments, or several although there are several passes; documents of which one begins again in its
                row, with several passes, with a model that answers once a row, with a memory that is one for all rows
                in training, or that begin inside a segment where the schedule is "diagonal".
        """
        told = padding
        if documents is not None:
            documents, padding = told_documents(documents, padding, inputs_BN)
            told = None  # the ids say it, where no device has to be waited for
        total = auxiliary = inputs_BN.new_zeros((), dtype=torch.float32)
        outs = list(self.read(inputs_BN, targets_BN, state, reset, told, places, documents))
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
        """The last pass, segment by segment: losses (B, n) of its tokens, the state after it, the auxiliary loss.

        Arguments and errors are those of `forward`.
        """
        pieces, resets = self._prepared(inputs_BN, targets_BN, reset, padding, places, documents)
        if self.passes > 1:
            state, resets = self._earlier_passes(pieces, state, reset), []
        if self.schedule == "diagonal":
            refuse_inside(pieces, self.schedule)
            if places is not None:
                raise ValueError("schedule='diagonal' takes no places; the memories that do span the layers")
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
        """Run all passes but the last; the state with which the last one begins, resets included."""
        return self._earlier_passes(self._pieces(inputs_BN, targets_BN, padding), state, reset)

    def _earlier_passes(self, pieces: list[Piece], state: State | None, reset: Tensor | None) -> State:
        state = begun(self.model, state, None if reset is None else reset.flatten(), len(pieces[0][0]))
        if self.passes == 1:
            return state
        next_pass = model_memory(self.model, self.passes).next_pass
        return read_earlier_passes(self._segment, pieces, state, next_pass, self.passes, self.bptt)

    def _resets(self, ids_BN: Tensor, given: list[Tensor | None], inputs_BN: Tensor) -> list[Tensor | None]:
        """Rows that begin anew at each segment: those that were given, and those in which another document begins."""
        between = resets_between(ids_BN, cut(inputs_BN.shape[1], self.segment_length))
        resets = [None if rows_B is None else rows_B.to(inputs_BN.device, non_blocking=True) for rows_B in between]
        for index, rows_B in enumerate(given):
            found = resets[index]
            resets[index] = rows_B if found is None or rows_B is None else rows_B | found
        return resets

    def _prepared(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        reset: Tensor | None,
        padding: Tensor | None,
        places: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[list[Piece], list[Tensor | None]]:
        """The segments of a batch, and the rows that begin anew at the first of them (ValueError: as of `forward`)."""
        _check_shapes(inputs_BN, targets_BN, padding)
        if places is not None:
            check_places(places, inputs_BN)
        self._check_reset(reset, inputs_BN.shape[1])
        resets: list[Tensor | None] = [] if reset is None else list(reset.view(len(reset), -1).unbind(1))
        if documents is not None:
            if self.passes > 1:
                refuse_documents(documents, f"passes={self.passes} begin again with what rows have read as a whole")
            check_suits(self.model)
            documents, padding = told_documents(documents, padding, inputs_BN)
            resets = self._resets(documents, resets, inputs_BN)
        return self._pieces(inputs_BN, targets_BN, padding, places, documents), resets

    def _pieces(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        padding_BN: Tensor | None,
        places: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> list[Piece]:
        if padding_BN is not None:
            targets_BN = targets_BN.masked_fill(padding_BN, IGNORED)
        return [
            (
                inputs_BN[:, part],
                targets_BN[:, part],
                None if padding_BN is None else padding_BN[:, part],
                None if places is None else places[:, part],
                None if documents is None else documents[:, part],
            )
            for part in cut(inputs_BN.shape[1], self.segment_length)
        ]

    def _check_reset(self, reset: Tensor | None, tokens: int) -> None:
        count = 1 if reset is None or reset.dim() == 1 else reset.shape[1]
        most = 1 if self.passes > 1 else -(-tokens // self.segment_length)
        if count > most:
            raise ValueError(
                f"resets at {count} segments of a batch of {tokens} tokens; passes={self.passes} over segments of "
                f"{self.segment_length} tokens can have {most}"
            )

    def _refuse_shards(self) -> None:
        """Blocks that FSDP gathers for themselves scatter their gradients before this loop could hand them on."""
        marks = ("set_reshard_after_backward", "_fsdp_wrapped_module")  # of fully_shard, of FullyShardedDataParallel
        sharded = [name for name, module in self.model.named_modules() if any(hasattr(module, m) for m in marks)]
        if sharded:
            raise ValueError(
                f"bptt_window='sliding' goes back through a segment several times, and FSDP wraps parts of the model "
                f"({sharded[0] or 'the model'}), which scatter their gradients at the first; wrap the loop alone, or "
                "take bptt_window='blocks'"
            )

    def _segment(self, piece: Piece, state: State | None, reset_B: Tensor | None) -> ModelOutput:
        """What is made of one segment, with the state after it."""
        inputs_BN, targets_BN, padding_BN, places, documents = piece
        if documents is None:
            return self._score(inputs_BN, targets_BN, places, state, padding_BN, reset_B)
        state, given = begun(self.model, state, reset_B, len(inputs_BN)), (inputs_BN, targets_BN, places)
        return read_documents(self._score, documents, None, given, state, self.model.init_state)  # type: ignore[arg-type]

    def _score(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        places: Tensor | None,
        state: State | None,
        padding_BN: Tensor | None,
        reset_B: Tensor | None = None,
    ) -> ModelOutput:
        arguments = (self.model, inputs_BN, targets_BN, state, reset_B, padding_BN)
        return self.scoring(*arguments) if places is None else self.scoring(*arguments, places)


def token_losses(
    model: nn.Module,
    inputs_BN: Tensor,
    targets_BN: Tensor,
    state: State | None = None,
    reset: Tensor | None = None,
    padding: Tensor | None = None,
    places: Tensor | None = None,
) -> ModelOutput:
    """Cross-entropy of every token of one segment, (B, N), in nats, with the state after it.

    Float32 or wider, since half precision cannot add thousands of terms; 0 where the target is -100. A model with
    `scores_targets = True` is asked for the losses themselves (`targets=`), so that it need not make all logits.
    """
    start: dict[str, Any] = {} if reset is None else {"reset": reset}
    if places is not None:
        start["places"] = places
    if getattr(model, "scores_targets", False):
        return model(inputs_BN, state, padding=padding, targets=targets_BN, **start)
    logits_BNV, state, auxiliary = model(inputs_BN, state, padding=padding, **start)
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
            "bptt_window='sliding' goes back through a segment several times, and a compiled model lets go of what it "
            "needs at the first; give the loop the model as it was, or take bptt_window='blocks'"
        )


def told_documents(documents: Tensor, padding: Tensor | None, inputs_BN: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids with what padding says, and padding with what the ids say."""
    check_documents(documents, *inputs_BN.shape[:2])
    ids_BN = ids_of(documents, padding)
    nothing_BN = ids_BN < 0
    return ids_BN, nothing_BN.to(inputs_BN.device) if bool(nothing_BN.any()) else None


def refuse_inside(pieces: list[Piece], schedule: str) -> None:
    """Refuse (ValueError) documents that do not begin with a segment."""
    for index, (*_, documents) in enumerate(pieces):
        if documents is not None and plan_documents(documents) is not None:
            raise ValueError(
                f"schedule={schedule!r} reads segments as they stand, and in segment {index} of the batch a document "
                "begins behind a row's first token, or behind padding; take schedule='segments', or let documents "
                "begin with segments, padded behind"
            )


def _check_shapes(inputs_BN: Tensor, targets_BN: Tensor, padding_BN: Tensor | None) -> None:
    if inputs_BN.dim() not in (2, 5) or inputs_BN.shape[1] == 0:
        raise ValueError(
            f"inputs of shape {tuple(inputs_BN.shape)} must be (rows, tokens) with at least one token, or videos "
            "(rows, frames, channels, height, width)"
        )
    for name, other in {"targets": targets_BN, "padding": padding_BN}.items():
        if other is not None and other.shape != inputs_BN.shape[:2]:
            raise ValueError(
                f"{name} of shape {tuple(other.shape)} must have the shape of the inputs, {tuple(inputs_BN.shape[:2])}"
            )
