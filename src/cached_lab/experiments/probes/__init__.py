"""Probes: the capacity of a memory, measured on tasks that only a memory can solve."""

from __future__ import annotations

from . import tasks
from .tasks import Episode, ProbeTask

__all__ = ["Episode", "ProbeTask", "tasks"]
