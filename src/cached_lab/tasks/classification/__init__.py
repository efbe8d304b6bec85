"""One label a row: images and token sequences."""
