"""Training: the loop, its data order, checkpoints, optimisers, metrics and data-parallel processes."""

from __future__ import annotations
