"""Tasks that only a memory can solve: the answer is in an earlier segment than the question.

A task makes episodes of any number of segments: the cue in the first or in any but the last, noise between, and the
question in the last; `distance` counts the segments from the first to the last. Attention within one segment never sees
both. The target is the answer at a few places and -100 elsewhere.

A family of tasks is a file; importing this package registers all of them.
"""

from __future__ import annotations

from .babilong import BookStories
from .base import IGNORED, NOISE, Episode, ProbeTask, StreamedTask
from .first_segment import Copy, Latch, Passkey
from .mqar import MQAR
from .needles import Needles, VariableTracking
from .pairs import AssociativeRecall, Remember, Rewrite

__all__ = [
    "IGNORED",
    "MQAR",
    "NOISE",
    "AssociativeRecall",
    "BookStories",
    "Copy",
    "Episode",
    "Latch",
    "Needles",
    "Passkey",
    "ProbeTask",
    "Remember",
    "Rewrite",
    "StreamedTask",
    "VariableTracking",
]
