"""Measurements of speed and memory; run them by `cached benchmark NAME`.

Everything in one table is measured in one process, in turn; a training step is forward, backward and AdamW.

A name, a length or a size that cannot be measured raises a ValueError, a library that is not installed an ImportError.
"""
