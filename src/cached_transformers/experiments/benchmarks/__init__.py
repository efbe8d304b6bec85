"""Measurements of speed and memory; run them by `cached benchmark NAME`."""
