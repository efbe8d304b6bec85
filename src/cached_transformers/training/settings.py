"""Options of the training loop (the `training` section of a recipe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how, and with what safeguards a run trains.

    `batch_size` counts the rows of one optimiser step over all processes and all accumulated pieces, so neither
    the number of processes nor `accumulate` changes what is learned.
    """

    seed: int = 0
    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1
    """Pieces in which each process works through its rows of a batch; saves memory."""
    clip_norm: float | None = 1.0
    """Largest L2 norm of all gradients together; null switches clipping off."""
    label_smoothing: float = 0.0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16 and float16 use autocast; float16 adds loss scaling and needs CUDA."""
    activation_checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    """auto (CUDA when there is one), cpu, cuda, or cuda:N."""
    workers: int = 0
    """Processes that load data; 0 loads in the training process."""
    evaluate_every: int = 100
    """Steps between evaluations on the whole validation split; there is one at the end in any case."""
    evaluation_batch_size: int | None = None
    """Rows per evaluation batch and process; null takes `batch_size`."""
    metric: Literal["accuracy", "loss"] = "accuracy"
    """Validation value that decides which checkpoint is the best."""
    test: Literal["best", "last", "none"] = "best"
    """Checkpoint that is evaluated on the test split when training is over."""
    save_every: int | None = None
    """Steps between checkpoints; null saves at each evaluation. The best and the last are saved in any case."""
    keep: int = 2
    """Newest checkpoints that stay on disk, besides the best."""
    log_every: int = 10
    """Steps between training lines in metrics.jsonl and on the screen."""
    tensorboard: Literal["auto", True, False] = "auto"
    """auto writes event files when tensorboard is installed."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "keep", "log_every", "max_bad_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("save_every", "evaluation_batch_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1, or null")
        _require(self.seed >= 0, "seed", self.seed, "must not be negative")
        _require(self.workers >= 0, "workers", self.workers, "must not be negative")
        _require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm, "must be positive, or null")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "must lie in [0, 1)")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulate={self.accumulate}: "
                "a batch is divided into equal pieces"
            )


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"training.{name}={value} {rule}")
