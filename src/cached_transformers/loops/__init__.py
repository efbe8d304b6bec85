"""Training and reading loops over the segments of a text."""
