"""Tasks that only a memory can solve: what is asked stands in an earlier segment than the question.

A task draws episodes of any number of segments. The first segments, or any but the last, hold the cue, the last one the
question, noise lies between; `distance` counts the segments from the first to the last. Segments are so short that
attention inside one never sees both. The answer is the target at a few places, -100 stands everywhere else.

A family of tasks is a file; importing this package registers all of them.
"""

from __future__ import annotations

from . import counting, needles, six_places, tracking
from .babilong import Babilong
from .base import IGNORED, NOISE, Episode, ProbeTask, StreamedTask
from .facts import Facts
from .first_segment import Copy, Latch, Passkey, Reverse
from .mqar import MQAR
from .pairs import Recall, Remember, Rewrite

__all__ = [
    "IGNORED",
    "MQAR",
    "NOISE",
    "Babilong",
    "Copy",
    "Episode",
    "Facts",
    "Latch",
    "Passkey",
    "ProbeTask",
    "Recall",
    "Remember",
    "Reverse",
    "Rewrite",
    "StreamedTask",
    "counting",
    "needles",
    "six_places",
    "tracking",
]
