"""Distillation: a student that reads segments with a memory learns from a teacher that sees the whole text.

The teacher is usually the same model without a memory, so that the difference between both is context alone
(self-distillation, as in AHN, arXiv:2510.07318). With p of the teacher and q of the student at token t, target y,

    loss_t = (floor + gain_t) (KL(p || q) - cross_entropy log q(y))
    gain_t = clamp(-log p_segment(y) + log p(y), 0, 1)

where p_segment is the teacher that sees the segment of t only: most tokens of a text need no context, and those that do
weigh up to 1 + 1 / floor times as much. The KL is over the teacher's `top` likeliest tokens, and the rest as one event:
a lower bound of the whole sum, 0 only where these probabilities agree.

Legend: B rows, N tokens, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.annotations import checked
from cached_transformers.checks import at_least_one
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.state import State

_LEAST = 1e-6
"""Least probability of all tokens outside the likeliest ones; below it float32 sums of probabilities are rounding."""


class TeacherAnswers(NamedTuple):
    """A teacher's answers for each token of a batch.

    Attributes:
        tokens_BNK: its likeliest next tokens, long. logs_BNK: their log-probabilities, float32.
        gain_BN: nats that the text before the segment saves it, within [0, 1]; 0 where there is no target.
    """

    tokens_BNK: Tensor
    logs_BNK: Tensor
    gain_BN: Tensor


@checked
@dataclass(frozen=True)
class Teacher:
    """A causal model whose predictions from the whole text train a student that reads segments.

    Args:
        model: called as `model(tokens)`, returns logits (B, N, V) first: a decoder of transformers, or a model of this
            package. It answers in evaluation mode, and receives no gradient.
        top: K, likeliest tokens that are compared one by one, at most all; None for all.
        floor: weight of a token for which the text before the segment gains nothing.
        cross_entropy: of the text's own tokens, beside the KL. A teacher that half knows an answer teaches no more.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> loop = SegmentLoop(student, segment_length=256, bptt=8, teacher=Teacher(base))
        >>> loss, state = loop(tokens[:, :-1], tokens[:, 1:])
    """

    model: nn.Module
    top: int | None = 64
    floor: float = 0.1
    cross_entropy: float = 0.5

    def __post_init__(self) -> None:
        if self.top is not None:
            at_least_one(top=self.top)
        for name, value in (("floor", self.floor), ("cross_entropy", self.cross_entropy)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be finite and not negative")

    def check(self, student: nn.Module) -> None:
        """Refuse (ValueError) a student of another vocabulary, or one that shares weights, which it could not train."""
        own, other = vocabulary_of(self.model), vocabulary_of(student)
        if None not in (own, other) and own != other:
            raise ValueError(
                f"teacher={type(self.model).__name__} has {own:,} token ids, the student {other:,}; distillation "
                "compares them one by one: take a teacher of the student's vocabulary"
            )
        if {*map(id, self.model.parameters())} & {*map(id, student.parameters())}:
            raise ValueError(
                f"teacher={type(self.model).__name__} shares weights with the student, whose memory would be the "
                "teacher's, too; load the teacher separately"
            )

    def check_rows(self, padding: Tensor | None, reset: Tensor | None) -> None:
        """Refuse (ValueError) rows that are no single text: padding before a token, or a reset inside."""
        if padding is not None and bool((padding[:, :-1] & ~padding[:, 1:]).any()):
            raise ValueError("padding before a token would be text to the teacher; pad rows on the right")
        if reset is not None and reset.dim() == 2 and bool(reset[:, 1:].any()):
            raise ValueError(
                "reset inside of a row: the teacher would see the text before it; let each text begin a row (a step of "
                "as many segments as a text has)"
            )

    @torch.no_grad()
    def answers(self, inputs_BN: Tensor, targets_BN: Tensor, segment_length: int) -> TeacherAnswers:
        """Read whole rows, and each segment of them separately (ValueError: rows longer than its positions)."""
        tokens = inputs_BN.shape[1]
        longest = getattr(getattr(self.model, "config", None), "max_position_embeddings", None) or tokens
        if tokens > longest:
            raise ValueError(
                f"rows of {tokens:,} tokens exceed the {longest:,} positions of teacher={type(self.model).__name__}; "
                "take fewer segments a step"
            )
        rows, trains = zip(inputs_BN.split(1), targets_BN.split(1), strict=True), self.model.training
        self.model.eval()
        try:
            found = [self._row(inputs_1N, targets_1N, segment_length) for inputs_1N, targets_1N in rows]
        finally:
            self.model.train(trains)
        return TeacherAnswers(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _row(self, inputs_1N: Tensor, targets_1N: Tensor, segment_length: int) -> TeacherAnswers:
        """Answers for one row: the logits of a whole text are the largest tensor here."""
        logits_1NV = self.model(inputs_1N)[0].float()
        lse_1N1 = logits_1NV.logsumexp(-1, keepdim=True)
        vocabulary = logits_1NV.shape[-1]
        logs_1NK, tokens_1NK = logits_1NV.topk(min(self.top or vocabulary, vocabulary))
        wanted_1N1 = targets_1N.clamp(min=0)[..., None]
        whole_1N = (logits_1NV.gather(-1, wanted_1N1) - lse_1N1)[..., 0]
        pieces = zip(inputs_1N.split(segment_length, 1), wanted_1N1.split(segment_length, 1), strict=True)
        alone_1N = torch.cat([self.model(x)[0].float().log_softmax(-1).gather(-1, y) for x, y in pieces], 1)[..., 0]
        gain_1N = (whole_1N - alone_1N).clamp(0, 1).masked_fill(targets_1N == IGNORED, 0)
        return TeacherAnswers(tokens_1NK, logs_1NK - lse_1N1, gain_1N)

    def losses(
        self,
        student: nn.Module,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        answers: TeacherAnswers,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> ModelOutput:
        """Run the student on one segment: losses (B, N) in nats, 0 where the target is -100, and its state."""
        start: dict[str, Any] = {} if reset is None else {"reset": reset}
        logits_BNV, state, auxiliary = student(inputs_BN, state, padding=padding, **start)
        logits_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        asked_BNK = torch.cat([answers.tokens_BNK, targets_BN.clamp(min=0)[..., None]], -1)
        # One gather: the gradient of each is a tensor as large as the logits.
        logs_BNK = logits_BNV.gather(-1, asked_BNK) - logits_BNV.logsumexp(-1, keepdim=True)
        kl_BN = _divergence(answers.logs_BNK, logs_BNK[..., :-1])
        losses_BN = (self.floor + answers.gain_BN) * (kl_BN - self.cross_entropy * logs_BNK[..., -1])
        return ModelOutput(losses_BN.masked_fill(targets_BN == IGNORED, 0), state, auxiliary)


def _divergence(own_BNK: Tensor, other_BNK: Tensor) -> Tensor:
    """KL (B, N) from log-probabilities of K tokens, with all other tokens as one event."""
    p_BNK = own_BNK.exp()
    rest_BN, other_rest_BN = ((1 - t.sum(-1)).clamp(min=_LEAST) for t in (p_BNK, other_BNK.exp()))
    return (p_BNK * (own_BNK - other_BNK)).sum(-1) + rest_BN * (rest_BN.log() - other_rest_BN.log())


def vocabulary_of(model: Any) -> int | None:
    """Number of token ids of a model of this package or of transformers; None if it does not say."""
    own = getattr(model, "vocabulary", None)
    return own if isinstance(own, int) else getattr(getattr(model, "config", None), "vocab_size", None)
