"""Options of the training loop (the `training` section of a recipe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cached_transformers.checks import comparing_lengths
from cached_transformers.loops.curriculum import AdaptiveCurriculum

from .scores import Score

_COUNTS = (
    *("steps", "batch_size", "accumulate", "evaluate_every", "keep", "log_every", "max_bad_steps", "repeats"),
    *("average_last", "segment_length", "segments", "bptt", "passes"),
)


@dataclass(frozen=True)
class TrainingConfig:
    """Length, method and safeguards of a run.

    `batch_size` counts the rows of one optimiser step over all processes and accumulated pieces, so that neither
    changes what is learned.
    """

    seed: int = 0
    steps: int = 1000
    batch_size: int = 32
    batch_tokens: int | None = None
    """Translation: most source tokens, and most target tokens, of a step's batch, padding included; pairs of a batch
    have similar lengths (`TokenOrder`). null counts rows, by `batch_size`."""
    accumulate: int = 1
    """Pieces into which each process splits its rows of a batch, to save memory."""
    clip_norm: float | None = 1.0
    """Largest L2 norm of all gradients; null does not clip."""
    label_smoothing: float = 0.0
    mixup: float = 0.0
    """Images: alpha of mixup (arXiv:1710.09412), the mean of two images and of their labels; 0 for none."""
    cutmix: float = 0.0
    """Images: alpha of CutMix (arXiv:1905.04899), a patch of one image in another; 0 for none. With both, each mixes
    half of the steps."""
    repeats: int = 1
    """Copies of each row in a batch, each with other augmentation (repeated augmentation)."""
    ema_decay: float | None = None
    """Decay per step of the moving average of the weights, which is then evaluated; null for none."""
    average_last: int = 1
    """Newest checkpoints whose weights are averaged after training and then tested; 1 averages none."""
    initial_weights: str | None = None
    """Initial weights: a run folder, a step folder, or a .safetensors or .pth file."""
    new_head: bool = False
    """Do not load the classifier of `initial_weights`; needed for another number of classes."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16 and float16 use autocast; float16 adds loss scaling and needs CUDA."""
    activation_checkpointing: bool = False
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several processes of torchrun: ddp averages gradients of whole models; fsdp also shards weights, gradients and
    optimiser states (`training/sharding.py`). It has no effect on one process."""
    device: str = "auto"
    """auto (CUDA if available), cpu, cuda, or cuda:N."""
    workers: int = 0
    """Processes that load data; 0 loads in the training process."""
    evaluate_every: int = 100
    """Steps between evaluations on the whole validation split; the last step is always evaluated."""
    evaluation_batch_size: int | None = None
    """Rows per evaluation batch and process; null takes `batch_size`. Text: streams, over all processes."""
    metric: Score = "accuracy"
    """Validation score that chooses the best checkpoint; text and detection need another than accuracy."""
    test: Literal["best", "last", "both", "none"] = "best"
    """Checkpoint to evaluate on the test split after training; with both, the best is the result."""
    save_every: int | None = None
    """Steps between checkpoints; null saves at each evaluation. The best and the last are always saved."""
    save: Literal["sync", "async"] = "sync"
    """async writes a copy of the checkpoint from memory in a thread (`training/async_checkpoint.py`)."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""
    log_every: int = 10
    """Steps between training lines in metrics.jsonl and on the screen."""
    tensorboard: Literal["auto", True, False] = "auto"
    """auto writes event files if tensorboard is installed."""
    segment_length: int = 128
    """Text: tokens in a segment."""
    segments: int = 1
    """Text: segments per row and step."""
    bptt: int = 1
    """Text: segments that a gradient crosses, within a step."""
    bptt_window: Literal["blocks", "sliding"] = "blocks"
    """Text: detach the state after every `bptt` segments of a step, or let each segment's loss reach back through
    `bptt` segments, at the cost of a longer backward (`loops/sliding.py`)."""
    recall: float = 0.0
    """Text: weight of reconstructing each segment from the memory that holds it (`ReconstructionLoss`); 0 for none."""
    teacher: bool = False
    """Text: learn from the pretrained host itself, without a memory, which sees all segments of a step
    (`loops/distillation.py`); its answers are kept on disk."""
    passes: int = 1
    """Text and documents: passes over the segments of a step (`SegmentLoop`); refused for text if a memory shows later
    tokens."""
    reset_rows: float = 0.0
    """Text: share of rows that begin a step with an empty memory, drawn at each step; 0 for none."""
    curriculum: tuple[int, ...] | None = None
    """Documents: largest number of segments in each stage; every step draws one from 1 to it. null reads documents as
    long as they are."""
    solved: float | None = None
    """Documents: validation accuracy, at the stage's longest documents, that ends a stage; the last stage continues."""
    replay: bool = False
    """Text and documents: keep the activations of one segment only, and recompute segments for their gradient
    (`ReplayLoop`)."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."""

    def __post_init__(self) -> None:
        null = "must be at least 1, or null"
        within = f"must not exceed training.segments={self.segments}: the segments of a step"
        multiple = f"must be a multiple of training.accumulate={self.accumulate}"
        for names, holds, rule in (
            (_COUNTS, lambda value: value >= 1, "must be at least 1"),
            (("save_every", "evaluation_batch_size", "batch_tokens"), lambda value: value is None or value >= 1, null),
            (("seed", "workers", "mixup", "cutmix", "recall"), lambda value: value >= 0, "must not be negative"),
            (("reset_rows",), lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
            (("clip_norm",), lambda value: value is None or value > 0, "must be positive, or null"),
            (("label_smoothing",), lambda value: 0 <= value < 1, "must lie in [0, 1)"),
            (("ema_decay",), lambda value: value is None or 0 <= value < 1, "must lie in [0, 1), or be null"),
            (("bptt",), lambda value: value == 1 or value <= self.segments, within),
            (("average_last",), lambda value: value <= self.keep, f"must not exceed training.keep={self.keep}"),
            (("batch_size",), lambda value: self.batch_tokens is not None or value % self.accumulate == 0, multiple),
        ):
            for name in names:
                if not holds(value := getattr(self, name)):
                    raise ValueError(f"training.{name}={value} {rule}")
        if self.average_last > 1:
            self._refuse(f"average_last={self.average_last}", "average_last=1", ema_decay=None)
        if self.bptt_window == "sliding" and self.bptt > 1:
            self._refuse("bptt_window='sliding'", "bptt_window=blocks", compile=False, passes=1)
        if self.parallel == "fsdp":
            precision = "bfloat16" if self.precision == "float16" else self.precision
            self._refuse("parallel='fsdp'", "parallel=ddp", precision=precision, compile=False)
        if self.curriculum is not None:
            if self.solved is None:
                way = "an accuracy that ends a stage"
                raise ValueError(f"training.curriculum={list(self.curriculum)} needs training.solved, {way}")
            try:
                make_curriculum(self)
            except ValueError as error:
                raise ValueError(f"training.curriculum: {error}") from None

    def _refuse(self, option: str, way_out: str, **needed: object) -> None:
        """Refuse options that do not have the values that another option needs."""
        for name, value in needed.items():
            if getattr(self, name) != value:
                shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
                raise ValueError(
                    f"training.{option} does not go with training.{name}={getattr(self, name)}; set "
                    f"training.{name}={shown}, or training.{way_out}"
                )

    @property
    def evaluation_rows(self) -> int:
        """Rows of an evaluation batch."""
        return self.evaluation_batch_size or self.batch_size

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of the model."""
        half = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.precision]
        return torch.autocast(device.type, half, enabled=self.precision != "float32")


@dataclass(frozen=True)
class EvaluationConfig:
    """Scoring and translation of text, during training and after it (the `evaluation` section of a recipe)."""

    segment_length: int | None = None
    """Tokens in a segment; null takes `training.segment_length`."""
    memory: Literal["carry", "reset", "shuffle"] = "carry"
    """Memory of a row from segment to segment: carried, emptied (as `training.reset_rows` or `data.reset` train it), or
    that of another row."""
    bleu_sentences: int | None = 0
    """Translation: number of first validation sentences translated for BLEU and chrF; null for all."""
    beams: int = 5
    """Translation: beams of the search."""
    length_penalty: float = 1.0
    """Translation: texts are ranked by log-probability / length ** length_penalty."""
    tokens: int | None = None
    """Translation: most tokens of a translation; null for twice the source tokens, plus 10."""

    def __post_init__(self) -> None:
        for name in ("segment_length", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"evaluation.{name}={value} must be at least 1, or null")
        if self.beams < 1:
            raise ValueError(f"evaluation.beams={self.beams} must be at least 1; 1 is greedy search")
        if self.bleu_sentences is not None and self.bleu_sentences < 0:
            raise ValueError(f"evaluation.bleu_sentences={self.bleu_sentences} must not be negative; null takes all")
        comparing_lengths(**{"evaluation.length_penalty": self.length_penalty})


def make_curriculum(settings: TrainingConfig) -> AdaptiveCurriculum | None:
    """Return the curriculum of the settings, if any (ValueError: its numbers do not fit each other)."""
    if settings.curriculum is None or settings.solved is None:
        return None
    return AdaptiveCurriculum(settings.curriculum, settings.solved, seed=settings.seed)
