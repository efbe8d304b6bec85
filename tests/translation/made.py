"""A made pair of languages: each word has its translation, and a sentence is translated word by word."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = {"der": "the", "hund": "dog", "katze": "cat", "sieht": "sees", "jagt": "hunts", "vogel": "bird"}
WORDS |= {"groß": "big", "schnell": "fast", "und": "and", "schläft": "sleeps"}


def sentence(generator: random.Random, longest: int = 6) -> tuple[str, str]:
    words = generator.choices(list(WORDS), k=generator.randint(1, longest))
    return " ".join(words), " ".join(WORDS[word] for word in words)


def write_corpus(folder: Path, sizes: tuple[int, int, int] = (300, 20, 30)) -> Path:
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in zip(("train", "val", "test"), sizes, strict=True):
        pairs = [sentence(generator) for _ in range(size)]
        for language, side in (("de", 0), ("en", 1)):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    return folder


def recipe(folder: Path, memory: Any = None, **training: Any) -> dict[str, Any]:
    """A small run on the made language."""
    settings = dict(steps=4, batch_tokens=400, evaluate_every=4, evaluation_batch_size=16, log_every=2, metric="loss")
    settings |= dict(label_smoothing=0.1, tensorboard=False, device="cpu")
    data = {"name": "translation", "source": "de", "target": "en", "path": str(folder)}
    return {
        "name": "made",
        "data": {**data, "vocabulary_size": 280, "max_length": 64},
        "model": dict(name="encoder_decoder", width=32, depth=1, heads=2, feed_forward=32, dropout=0.1, memory=memory),
        "training": {**settings, **training},
        "optimizer": {"learning_rate": 0.04, "weight_decay": 0.0, "betas": [0.9, 0.98]},
        "schedule": {"name": "inverse_sqrt", "warmup_steps": 10},
    }
