"""Measurements of speed and memory, one script per subject: `python benchmarks/NAME.py`, or `cached benchmark NAME`.

All numbers of one table are measured in one process, in turn. A training step is forward, backward and AdamW. A name,
length or size that cannot be measured raises a ValueError, a missing library an ImportError.
"""
