"""A made text, and a language model of its bytes that has hardly trained; made images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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


def make_cifar10(folder: Path, train: int = 120, test: int = 60) -> Path:
    """Write one training batch and the test batch; returns the folder."""
    folder.mkdir(parents=True)
    for name, count, seed in (("data_batch_1.bin", train, 0), ("test_batch.bin", test, 1)):
        generator = np.random.default_rng(seed)
        labels = np.arange(count) % 10
        y, x = np.mgrid[0:32, 0:32]
        records = np.empty((count, 3073), dtype=np.uint8)
        for record, label in zip(records, labels, strict=True):
            stripes = np.sin((x if label % 2 else y) * (1 + label // 2) / 4)
            colour = 0.5 + 0.4 * np.cos(label + np.arange(3))
            image = 128 + 80 * colour[:, None, None] * stripes + generator.normal(0, 20, (3, 32, 32))
            record[0], record[1:] = label, np.clip(image, 0, 255).astype(np.uint8).ravel()
        generator.shuffle(records)
        (folder / name).write_bytes(records.tobytes())
    return folder
