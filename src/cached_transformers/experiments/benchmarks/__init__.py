"""Measurements of speed and memory; run them by `cached benchmark NAME`.

A name, a length or a size that cannot be measured raises a ValueError, a library that is not installed an ImportError.
"""
