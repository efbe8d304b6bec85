"""Probes: what a memory can hold, shown on tasks that nothing but a memory can solve."""

from __future__ import annotations

from . import tasks
from .tasks import Episode, ProbeTask

__all__ = ["Episode", "ProbeTask", "tasks"]
