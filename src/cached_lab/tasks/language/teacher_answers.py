"""Answers of a teacher, kept on disk: every run with the same texts and teacher reads them instead of asking again."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.store import Arrays, load_or_build
from cached_transformers.integrations.frozen_host import host_digest
from cached_transformers.loops.distillation import Teacher, TeacherAnswers


class StoredTeacher:
    """A teacher whose answers are in the cache, by the digest of a row.

    Args:
        teacher: see `Teacher`. segment_length: tokens in a segment of the student.
    """

    def __init__(self, teacher: Teacher, segment_length: int) -> None:
        self.teacher, self.segment_length = teacher, segment_length
        weights = host_digest(teacher.model).numpy().tobytes().hex()
        self._key = {"teacher": weights, "top": teacher.top, "segment": segment_length, "version": 1}

    def answers(self, inputs_BN: Tensor, targets_BN: Tensor) -> TeacherAnswers:
        """Return the answers for rows, in the precision of the store (float16)."""
        rows = [self._row(*row) for row in zip(inputs_BN.split(1), targets_BN.split(1), strict=True)]
        return TeacherAnswers(*(torch.cat(parts).to(inputs_BN.device) for parts in zip(*rows, strict=True)))

    def _row(self, inputs_1N: Tensor, targets_1N: Tensor) -> TeacherAnswers:
        def ask() -> Arrays:
            tokens, logs, gain = self.teacher.answers(inputs_1N, targets_1N, self.segment_length)
            return {
                "tokens": tokens.cpu().numpy().astype(np.int32),
                "logs": logs.cpu().numpy().astype(np.float16),
                "gain": gain.cpu().numpy().astype(np.float16),
            }

        told = b"".join(t.cpu().numpy().tobytes() for t in (inputs_1N, targets_1N))
        found = load_or_build("answers", {**self._key, "row": hashlib.sha256(told).hexdigest()}, ask)
        tokens, logs, gain = (torch.from_numpy(found[name]) for name in ("tokens", "logs", "gain"))
        return TeacherAnswers(tokens.long(), logs.float(), gain.float())
