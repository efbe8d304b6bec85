"""A tiny data set and model under registered names.

The environment variable STANDIN_DELAY gives every row of data a delay in seconds, so that a test can strike while a run
is under way.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_lab.registries import DATASETS
from cached_transformers.registry import MODELS


class Rows(NamedTuple):
    inputs: Tensor
    targets: Tensor
    padding: Tensor | None


@DATASETS.register("standin_rows")
class StandinRows:
    """Points in the plane labelled by quadrant; training rows are jittered with torch's global generator."""

    classes = 4

    def __init__(self, split: str, size: int = 50, seed: int = 7, augment: bool = True, poison: int = -1) -> None:
        generator = torch.Generator().manual_seed(seed + {"train": 0, "validation": 1, "test": 2}[split])
        self.points = torch.randn(size, 2, generator=generator)
        self.labels = (self.points > 0).long() @ torch.tensor([1, 2])
        if split == "train" and poison >= 0:
            self.points[poison:] = float("nan")
        self.split = split
        self.augment = augment and split == "train"

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(float(os.environ.get("STANDIN_DELAY", "0")))
        noise = 0.1 * torch.randn(2) if self.augment else torch.zeros(2)
        return self.points[index] + noise, int(self.labels[index])

    def collate(self, items: list[tuple[Tensor, int]]) -> Rows:
        return Rows(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]), None)

    def describe(self) -> dict[str, object]:
        return {"name": "standin_rows", "split": self.split, "size": len(self), "classes": self.classes}


class Output(NamedTuple):
    outputs: Tensor
    state: tuple[()]
    auxiliary_loss: Tensor


@MODELS.register("standin_mlp")
class StandinMLP(nn.Module):
    """A perceptron with dropout and a buffer that moves while it trains, as a shared cache does."""

    def __init__(
        self,
        classes: int,
        width: int = 16,
        dropout: float = 0.1,
        rate: float = 0.1,
        memory: str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.dropout, self.rate = dropout, rate
        self.register_buffer("average", torch.zeros(width))

    def forward(self, inputs: Tensor) -> Output:
        x = self.norm(torch.relu(self.hidden(inputs)))
        if self.training:
            self.average.lerp_(x.detach().float().mean(0), self.rate)
        x = nn.functional.dropout(x + 0.1 * self.average, self.dropout, self.training)
        return Output(self.head(x), (), x.new_zeros(()))


def recipe(**training: object) -> dict[str, object]:
    """A recipe for the pair, as nested dictionaries."""
    settings = dict(steps=12, batch_size=8, evaluate_every=4, log_every=2, tensorboard=False, device="cpu")
    tree: dict[str, object] = {"name": "standin", "data": {"name": "standin_rows"}, "model": {"name": "standin_mlp"}}
    tree |= {"optimizer": {"learning_rate": 0.01}, "schedule": {"name": "cosine", "warmup_steps": 3}}
    return tree | {"training": {**settings, **training}}
