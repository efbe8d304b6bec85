"""Tasks that only a memory can solve: the answer is in an earlier segment than the question.

A task makes episodes of any number of segments: the cue in the first or in any but the last, noise between, and the
question in the last; `distance` counts the segments from the first to the last. Attention within one segment never sees
both. The target is the answer at a few places and -100 elsewhere.

A family of tasks is a file; importing this package registers all of them.
"""

from __future__ import annotations

from . import babilong, mqar, needles, pairs  # noqa: F401  (they register their tasks)
from .base import IGNORED, Episode, ProbeTask
from .first_segment import Copy, Latch

__all__ = ["IGNORED", "Copy", "Episode", "Latch", "ProbeTask"]
