"""Options of the training loop (the `training` section of a recipe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cached_transformers.checks import comparing_lengths
from cached_transformers.loops.curriculum import AdaptiveCurriculum, Curriculum

from .scores import Score


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how, and with what safeguards a run trains.

    `batch_size` counts the rows of one optimiser step over all processes and all accumulated pieces, so neither
    the number of processes nor `accumulate` changes what is learned.
    """

    seed: int = 0
    steps: int = 1000
    batch_size: int = 32
    batch_tokens: int | None = None
    """Translation: source tokens, and target tokens, padding included, that the batch of a step has at most; batches
    are then of pairs that are about as long (see `TokenOrder`). null counts rows, by `batch_size`."""
    accumulate: int = 1
    """Pieces in which each process works through its rows of a batch; saves memory."""
    clip_norm: float | None = 1.0
    """Largest L2 norm of all gradients together; null switches clipping off."""
    label_smoothing: float = 0.0
    mixup: float = 0.0
    """Images: alpha of mixup (arXiv:1710.09412), the mean of two images and of their labels; 0 switches it off."""
    cutmix: float = 0.0
    """Images: alpha of CutMix (arXiv:1905.04899), a piece of one image in another; 0 switches it off."""
    mix_probability: float = 1.0
    """Share of the steps that mix, where mixup or cutmix is on."""
    cutmix_share: float = 0.5
    """Share of these steps that take CutMix, where both are on."""
    repeats: int = 1
    """How often each row of a batch is in it, each time with other augmentation (repeated augmentation)."""
    ema_decay: float | None = None
    """Decay, per step, of the moving average of the weights, which is then evaluated; null keeps none."""
    ema_warmup: bool = False
    """Whether the decay grows as (1 + t) / (10 + t) up to its value, so that a short run forgets its beginning."""
    average_last: int = 1
    """So many newest checkpoints whose weights are averaged when training is over, and then tested; 1 averages none."""
    average_caches: Literal["copy", "average"] = "copy"
    """What becomes of caches, and other buffers, in that average: those of the newest checkpoint, or their average."""
    initial_weights: str | None = None
    """Weights to begin with: a run folder, a step folder, or a .safetensors or .pth file."""
    new_head: bool = False
    """Whether the classifier of `initial_weights` is left out, as it must be for another number of classes."""
    reset_caches: bool = False
    """Whether the shared caches of `initial_weights` are left out, so that caches begin empty."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16 and float16 use autocast; float16 adds loss scaling and needs CUDA."""
    activation_checkpointing: bool = False
    compile: bool = False
    parallel: Literal["ddp", "fsdp", "none"] = "ddp"
    """What several processes of torchrun do: ddp averages gradients of whole models; fsdp also cuts weights, gradients
    and optimiser states up between them (`training/sharding.py`); none refuses several. One process does neither."""
    pipeline: int = 1
    """Text: processes that share the segments of each row (`SegmentPipeline`). torchrun starts so many, or a multiple
    of it, which read other rows."""
    shares: int | None = None
    """Of fsdp: into how many parts weights are cut, each process having one; null for as many as there are processes.
    Fewer, as those of one machine, make copies, whose gradients are averaged (hybrid sharding)."""
    device: str = "auto"
    """auto (CUDA when there is one), cpu, cuda, or cuda:N."""
    workers: int = 0
    """Processes that load data; 0 loads in the training process."""
    evaluate_every: int = 100
    """Steps between evaluations on the whole validation split; there is one at the end in any case."""
    evaluation_batch_size: int | None = None
    """Rows per evaluation batch and process; null takes `batch_size`. Text: streams, over all processes."""
    metric: Score = "accuracy"
    """Validation value that decides which checkpoint is the best; text and detection need another than accuracy."""
    test: Literal["best", "last", "both", "none"] = "best"
    """Checkpoint that is evaluated on the test split when training is over; of both, the best is the result."""
    save_every: int | None = None
    """Steps between checkpoints; null saves at each evaluation. The best and the last are saved in any case."""
    save: Literal["sync", "async"] = "sync"
    """Whether training waits until a checkpoint is on disk, or goes on while a thread writes a copy of it from memory
    (`training/saves.py`)."""
    keep: int = 2
    """Newest checkpoints that stay on disk, besides the best."""
    log_every: int = 10
    """Steps between training lines in metrics.jsonl and on the screen."""
    tensorboard: Literal["auto", True, False] = "auto"
    """auto writes event files when tensorboard is installed."""
    segment_length: int = 128
    """Text: tokens in a segment."""
    segments: int = 1
    """Text: segments that each row reads in one step."""
    bptt: int = 1
    """Text: segments that a gradient may cross, within a step."""
    bptt_window: Literal["blocks", "sliding"] = "blocks"
    """Text: whether the gradient is cut after every `bptt` segments of a step, or each segment's loss reaches back
    through so many, for a dearer backward (`training/sliding.py`)."""
    recall: float = 0.0
    """Text: weight of saying each segment again from the memory that holds it (`Recall`), an auxiliary loss; 0 for
    none."""
    passes: int = 1
    """Text and documents: how often the segments of a step are read (`SegmentLoop`); refused for text where a memory
    shows what follows."""
    reset_rows: float = 0.0
    """Text: share of the rows that begin a step with an empty memory, drawn anew for each step; 0 empties none."""
    curriculum: tuple[int, ...] | None = None
    """Documents: the largest number of segments of each stage; every step draws one from 1 to it. null reads documents
    as long as they are."""
    steps_each: int | tuple[int, ...] | None = None
    """Documents: steps of every stage, or of each; the last one goes on to the end."""
    solved: float | None = None
    """Documents, in the place of `steps_each`: a stage ends when validation documents as long as its longest are
    answered with this accuracy."""
    replay: bool = False
    """Documents: keep no activations but those of one segment, and run segments again for their gradient
    (`ReplayLoop`)."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulate", "evaluate_every", "keep", "log_every", "max_bad_steps")
        for name in (*counts, "repeats", "average_last", "pipeline", "segment_length", "segments", "bptt", "passes"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        if self.bptt > self.segments:
            raise ValueError(
                f"training.bptt={self.bptt} must not exceed training.segments={self.segments}: "
                "a gradient stays within the step"
            )
        if self.bptt_window == "sliding" and self.bptt > 1 and (self.compile or self.passes > 1):
            other = "compile=true" if self.compile else f"passes={self.passes}"
            raise ValueError(
                f"training.bptt_window='sliding' goes back through a segment several times, which training.{other} "
                "does not allow; leave one of them out"
            )
        if self.reset_rows == 1 and self.segments == 1:
            raise ValueError(
                "training.reset_rows=1.0 with training.segments=1 empties the memory before each segment, so that "
                "nothing is read of it and it learns nothing; lower the share, or read more segments in a step"
            )
        self._check_curriculum()
        self._check_pipeline()
        _require(self.shares is None or self.shares >= 2, "shares", self.shares, "must be at least 2, or null")
        if self.shares is not None and self.parallel != "fsdp":
            raise ValueError(
                f"training.shares={self.shares} is of training.parallel=fsdp, not of {self.parallel}; leave it out"
            )
        if self.parallel == "fsdp":
            for name, value in (("precision", "float16"), ("compile", True)):
                if getattr(self, name) == value:
                    raise ValueError(
                        f"training.parallel='fsdp' does not go with training.{name}={value}; take "
                        f"{'bfloat16 or float32' if name == 'precision' else 'compile=false'}, or training.parallel=ddp"
                    )
        for name in ("save_every", "evaluation_batch_size", "batch_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1, or null")
        _require(self.seed >= 0, "seed", self.seed, "must not be negative")
        _require(self.workers >= 0, "workers", self.workers, "must not be negative")
        _require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm, "must be positive, or null")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "must lie in [0, 1)")
        for name in ("mixup", "cutmix", "recall"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative; 0 switches it off")
        for name in ("mix_probability", "cutmix_share", "reset_rows"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must lie in [0, 1]")
        decay = self.ema_decay
        _require(decay is None or 0 <= decay < 1, "ema_decay", decay, "must lie in [0, 1), or be null")
        for name in ("new_head", "reset_caches"):
            if getattr(self, name) and self.initial_weights is None:
                raise ValueError(f"training.{name}=true is about training.initial_weights, which are not given")
        if self.average_last > self.keep:
            raise ValueError(
                f"training.average_last={self.average_last} checkpoints are averaged, and training.keep={self.keep} "
                "stay; keep as many"
            )
        if self.average_last > 1 and self.ema_decay is not None:
            raise ValueError(
                f"training.average_last={self.average_last} and training.ema_decay={self.ema_decay} both average "
                "weights; take one of them"
            )
        if self.batch_tokens is None and self.batch_size % self.accumulate:
            raise ValueError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulate={self.accumulate}: "
                "a batch is divided into equal pieces"
            )

    def _check_pipeline(self) -> None:
        if self.pipeline == 1:
            return
        if self.pipeline > self.segments:
            raise ValueError(
                f"training.pipeline={self.pipeline} processes have training.segments={self.segments} segments of a row "
                "to share; take as many segments as processes, or more"
            )
        refused: tuple[tuple[str, object, object], ...] = (
            ("parallel", self.parallel, "ddp"),
            ("passes", self.passes, 1),
            ("compile", self.compile, False),
            *([("bptt_window", self.bptt_window, "blocks")] if self.bptt > 1 else []),
        )
        for name, given, plain in refused:
            if given != plain:
                raise ValueError(
                    f"training.pipeline={self.pipeline} does not go with training.{name}={given}; take "
                    f"training.{name}={plain}, or training.pipeline=1"
                )

    def _check_curriculum(self) -> None:
        given = [name for name in ("steps_each", "solved") if getattr(self, name) is not None]
        if self.curriculum is None:
            if given:
                raise ValueError(
                    f"training.{given[0]}={getattr(self, given[0])} is of training.curriculum, which is not given"
                )
            return
        if len(given) != 1:
            raise ValueError(
                f"training.curriculum={list(self.curriculum)} needs training.steps_each (steps of a stage) or "
                f"training.solved (an accuracy that ends it), and one of them; {len(given)} are given"
            )
        try:
            found = make_curriculum(self)
        except ValueError as error:
            raise ValueError(f"training.curriculum: {error}") from None
        if isinstance(found, Curriculum) and (before := sum(found.steps[:-1])) >= self.steps:
            raise ValueError(
                f"training.steps={self.steps} end before the last stage of training.curriculum, which begins after "
                f"{before}; raise training.steps, or lower training.steps_each"
            )

    @property
    def evaluation_rows(self) -> int:
        """Rows of an evaluation batch."""
        return self.evaluation_batch_size or self.batch_size

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which the model runs."""
        half = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.precision]
        return torch.autocast(device.type, half, enabled=self.precision != "float32")


@dataclass(frozen=True)
class EvaluationConfig:
    """How text is scored and translated, while a run trains and after it (the `evaluation` section of a recipe)."""

    segment_length: int | None = None
    """Tokens in a segment; null takes `training.segment_length`."""
    memory: Literal["carry", "reset", "shuffle"] = "carry"
    """What a row keeps from segment to segment: its memory, nothing (which training meets where `training.reset_rows`
    or `data.reset` say so), or the memory of another row."""

    bleu_sentences: int | None = 0
    """Translation: validation sentences that are translated for BLEU and chrF each time, the first ones; null: all."""
    beams: int = 5
    """Translation: continuations of a sentence that the search keeps."""
    length_penalty: float = 1.0
    """Translation: a text is as good as its log-probability / length ** length_penalty."""
    tokens: int | None = None
    """Translation: tokens of a translation at most; null: twice those of the source, and 10."""

    def __post_init__(self) -> None:
        for name in ("segment_length", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"evaluation.{name}={value} must be at least 1, or null")
        if self.beams < 1:
            raise ValueError(f"evaluation.beams={self.beams} must be at least 1; 1 takes the likeliest token each time")
        if self.bleu_sentences is not None and self.bleu_sentences < 0:
            raise ValueError(f"evaluation.bleu_sentences={self.bleu_sentences} must not be negative; null takes all")
        comparing_lengths(**{"evaluation.length_penalty": self.length_penalty})


def make_curriculum(settings: TrainingConfig) -> Curriculum | AdaptiveCurriculum | None:
    """The curriculum that the settings ask for, if any (ValueError: its numbers do not fit each other)."""
    if settings.curriculum is None:
        return None
    if settings.solved is not None:
        return AdaptiveCurriculum(settings.curriculum, settings.solved, seed=settings.seed)
    assert settings.steps_each is not None
    return Curriculum(settings.curriculum, settings.steps_each, seed=settings.seed)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"training.{name}={value} {rule}")
