"""A made CIFAR-10: pictures of ten classes that differ in colour and stripes, in the layout of the binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np


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
