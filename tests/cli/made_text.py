"""A made text, and a language model of its bytes that has hardly trained."""

from __future__ import annotations

from pathlib import Path

from cached_lab.cli.main import main

TEXT = "It was the best of times, it was the worst of times.\nIt was spring.\n\n  And winter, naïve — too.\n" * 60


def train_on_bytes(folder: Path, *overrides: str) -> Path:
    """Train it; returns the run folder."""
    (folder / "input.txt").write_text(TEXT)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"data: {{name: enwik8, path: {folder / 'input.txt'}}}\n"
        "model: {name: language_model, width: 16, depth: 1, heads: 2, feed_forward: 16, "
        "memory: {name: grc_stream, length: 4}}\n"
        "training: {steps: 2, batch_size: 2, segment_length: 8, metric: bits_per_byte}\n"
        "optimizer: {name: adamw, learning_rate: 1e-3}\n"
    )
    assert main(["train", str(recipe), *overrides, "--out", str(folder / "run")]) == 0
    return folder / "run"
