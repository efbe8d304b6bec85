"""Training over segments: a batch is cut into segments, the state crosses all of them, the gradient `bptt` of them.

The loop is the module that DDP and FSDP wrap, not the model inside: whatever the number of segments, the wrapper sees
one forward for each backward.

Legend: B rows, N tokens of all segments, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.seam.memory import ModelMemory
from cached_transformers.state import State, detach
from cached_transformers.state import reset as reset_rows

IGNORED = -100
"""Target that takes no part in the loss, as in torch.nn.functional.cross_entropy."""


class SegmentLoop(nn.Module):
    """Runs a model over the segments of a batch and returns one loss (truncated backpropagation through time).

    Args:
        model: called as `model(inputs, state, reset=..., padding=...)`, gives a `ModelOutput` with logits (B, n, V).
        segment_length: tokens in a segment; the last one may be shorter.
        bptt: segments that a gradient may cross. The state is cut after every `bptt` segments and at the end.
        passes: how often the batch is run through. Between two passes the model memory's `next_pass` turns the states
            after each segment into the state that the next pass begins with; the loss is that of the last pass. In it
            the memory has read all inputs, so that targets must not be among them: no next-token loss, no perplexity.
            The gradient crosses from pass to pass where `bptt` covers all segments of the batch.

    Attributes:
        auxiliary_loss: what the last loss held beside the cross-entropy, detached.

    Raises:
        ValueError: a size below 1, or several passes over a model without a stack.

    Example:
        >>> loop = SegmentLoop(model, segment_length=512, bptt=2)
        >>> loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        >>> loss.backward()
    """

    def __init__(self, model: nn.Module, segment_length: int, bptt: int = 1, passes: int = 1) -> None:
        super().__init__()
        for name, value in {"segment_length": segment_length, "bptt": bptt, "passes": passes}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if passes > 1 and not hasattr(model, "stack"):
            raise ValueError(
                f"passes={passes} needs a model with a stack, whose memory says how to go on; take passes=1"
            )
        self.model, self.segment_length, self.bptt, self.passes = model, segment_length, bptt, passes
        self.auxiliary_loss = torch.zeros(())

    def forward(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The loss of the batch, and the state after it, cut from the graph.

        Args:
            inputs_BN: token ids.
            targets_BN: token ids to predict; -100 takes no part.
            state: state after the last batch; None for the start of streams.
            reset: bool, rows that begin a new document at the first token of this batch, (B,), or at the first token
                of each of its first S segments, (B, S).
            padding: (B, N) bool, True = padding, which takes no part in the loss and is not remembered.

        Returns:
            Mean cross-entropy (nats) over all tokens that take part, 0 if there is none, plus the mean over segments of
            the auxiliary losses; and the state. One backward gives the gradient of every window of `bptt` segments.

        Raises:
            ValueError: there is no token, the shapes of inputs, targets and padding differ, or there are more resets
                than segments, or several although there are several passes.
        """
        _check_shapes(inputs_BN, targets_BN, padding)
        self._check_reset(reset, inputs_BN.shape[1])
        if padding is not None:
            targets_BN = targets_BN.masked_fill(padding, IGNORED)
        state, reset = self.earlier_passes(inputs_BN, targets_BN, state, reset, padding)
        loss, states = self._run(inputs_BN, targets_BN, state, reset, padding)
        return loss, detach(states[-1])

    def earlier_passes(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> tuple[State | None, Tensor | None]:
        """All passes but the last; the state and the reset mask with which the last one begins."""
        for _ in range(self.passes - 1):
            state, reset = self._next_pass(inputs_BN, targets_BN, state, reset, padding), None
        return state, reset

    def _next_pass(
        self, inputs_BN: Tensor, targets_BN: Tensor, state: State | None, reset: Tensor | None, padding: Tensor | None
    ) -> State:
        """Run one pass that is not the last; the state with which the next one begins."""
        memory: ModelMemory = self.model.stack.model_memory  # type: ignore[union-attr, assignment]
        fresh = self.model.init_state(inputs_BN.shape[0])  # type: ignore[operator]
        state = fresh if state is None else state if reset is None else reset_rows(state, fresh, reset.flatten())
        _, states = self._run(inputs_BN, targets_BN, state, None, padding)
        after = memory.next_pass(state, states)
        return after if len(states) <= self.bptt else detach(after)

    def _run(
        self, inputs_BN: Tensor, targets_BN: Tensor, state: State | None, reset: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, list[State]]:
        """One pass: its loss, and the state after each segment."""
        segments = [t.split(self.segment_length, 1) for t in (inputs_BN, targets_BN)]
        paddings = [None] * len(segments[0]) if padding is None else padding.split(self.segment_length, 1)
        total = auxiliary = inputs_BN.new_zeros((), dtype=torch.float32)
        resets = [] if reset is None else list(reset.view(len(reset), -1).unbind(1))
        states: list[State] = []
        for index, (inputs, targets, padded) in enumerate(zip(*segments, paddings, strict=True)):
            if index and index % self.bptt == 0:
                state = detach(state)
            start = resets[index] if index < len(resets) else None
            losses, state, extra = self._segment(inputs, targets, state, start, padded)
            total = total + losses.sum()
            auxiliary = auxiliary + extra
            states.append(state)
        count = (targets_BN != IGNORED).sum().clamp(min=1)
        auxiliary = auxiliary / len(states)
        self.auxiliary_loss = auxiliary.detach()
        return total / count + auxiliary, states

    def _check_reset(self, reset: Tensor | None, tokens: int) -> None:
        count = 1 if reset is None or reset.dim() == 1 else reset.shape[1]
        most = 1 if self.passes > 1 else -(-tokens // self.segment_length)
        if count > most:
            raise ValueError(
                f"resets at {count} segments of a batch of {tokens} tokens; passes={self.passes} over segments of "
                f"{self.segment_length} tokens can have {most}"
            )

    def _segment(
        self, inputs_BN: Tensor, targets_BN: Tensor, state: State | None, reset: Tensor | None, padding: Tensor | None
    ) -> ModelOutput:
        """Token losses of one segment, with the state after it."""
        return token_losses(self.model, inputs_BN, targets_BN, state, reset, padding)


def token_losses(
    model: nn.Module,
    inputs_BN: Tensor,
    targets_BN: Tensor,
    state: State | None = None,
    reset: Tensor | None = None,
    padding: Tensor | None = None,
) -> ModelOutput:
    """Cross-entropy of every token of one segment, (B, N), in nats, with the state after it.

    Float32 or wider, since half precision cannot add thousands of terms; 0 where the target is -100. A model with
    `scores_targets = True` is asked for the losses themselves (`targets=`), so that it need not make all logits.
    """
    start: dict[str, Any] = {} if reset is None else {"reset": reset}
    if getattr(model, "scores_targets", False):
        return model(inputs_BN, state, padding=padding, targets=targets_BN, **start)
    logits_BNV, state, auxiliary = model(inputs_BN, state, padding=padding, **start)
    wide = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), targets_BN.flatten(), ignore_index=IGNORED, reduction="none")
    return ModelOutput(losses.view_as(targets_BN), state, auxiliary)


def _check_shapes(inputs_BN: Tensor, targets_BN: Tensor, padding_BN: Tensor | None) -> None:
    if inputs_BN.dim() != 2 or inputs_BN.shape[1] == 0:
        raise ValueError(f"inputs of shape {tuple(inputs_BN.shape)} must be (rows, tokens) with at least one token")
    for name, other in {"targets": targets_BN, "padding": padding_BN}.items():
        if other is not None and other.shape != inputs_BN.shape:
            raise ValueError(
                f"{name} of shape {tuple(other.shape)} must have the shape of the inputs, {tuple(inputs_BN.shape)}"
            )
