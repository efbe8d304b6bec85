"""Language modelling: streams of text, with a state that is carried from step to step and saved with the run.

Legend: B rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.data.text import TextDataset
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_lab.training.settings import TrainingConfig
from cached_lab.training.task import Arguments, Task
from cached_transformers.extras import require
from cached_transformers.integrations.models import TransformersModel
from cached_transformers.loops.distillation import Teacher
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.state import State, from_tensors, map_state, named_tensors

from .hub_stream import HuggingFaceStream, StreamedRows
from .scores import check_passes, evaluate_language, evaluation_streams
from .streams import IGNORED, StreamBatch, Streams, grain, rows_to_empty
from .teacher_answers import StoredTeacher

_PLACES = "places/"
"""Prefix of the names of a stream's positions, next to those of the state."""


class LanguageModelling(Task):
    """Next-token prediction over streams; each row keeps its position in the text, and its memory, from step to step.

    A step reads `segments` segments of every row; a share of `reset_rows` of the rows begins it with an empty memory.
    The rows of a batch are divided over processes and accumulated pieces, each with its own part of the state. A
    skipped step leaves the state unchanged.

    Raises:
        ValueError: settings or a model that do not suit text.
    """

    width = 2
    takes = frozenset({"replay"})

    def __init__(
        self, config: RunConfig, model: nn.Module, train: TextDataset, validation: TextDataset, world: World
    ) -> None:
        super().__init__(config, model, train, validation, world)
        check(config, model, train, validation)
        settings = self.settings
        self.share.check(settings.batch_size)
        self.streams = _streams(train, settings)
        evaluation_streams(validation, config)  # refuses too many rows before training
        self._rows = settings.batch_size // self.share.processes
        self._piece = self._rows // settings.accumulate
        self._states: list[State | None] = [None] * settings.accumulate
        self._coming: list[State] = []

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        settings = self.settings
        # One graph serves every segment, so the model is compiled instead of the loop.
        model: Any = torch.compile(self.model) if settings.compile else self.model
        sizes = (settings.segment_length, settings.bptt, settings.passes)
        scoring: Any = ReconstructionLoss(settings.recall) if settings.recall else None
        kind = ReplayLoop if settings.replay else SegmentLoop
        self._teacher = make_teacher(self.model, settings) if settings.teacher else None
        taught = None if self._teacher is None else self._teacher.teacher
        self._loop = kind(model, *sizes, scoring=scoring, bptt_window=settings.bptt_window, teacher=taught)
        wrapped = self.wrapped(self._loop)
        return wrapped, wrapped

    def batches(self, step: int) -> Iterator[StreamBatch]:
        first = self.share.rank * self._rows
        while True:
            emptied_B = rows_to_empty(self.settings, step) if self.settings.reset_rows else None
            for begin in range(first, first + self._rows, self._piece):
                rows = slice(begin, begin + self._piece)
                batch = self.streams.batch(step, rows)
                yield batch if emptied_B is None else batch.emptied(emptied_B[rows])
            step += 1

    def backward(self, runner: Callable[..., Any], batch: StreamBatch, scaler: torch.amp.GradScaler) -> Tensor:
        device, state = self.world.device, self._states[len(self._coming)]
        inputs, targets, reset, padding = batch.moved(device)
        if state is None and self.shards is None:
            # With shards the weights exist only inside the runner, which makes the state.
            state = self.model.init_state(len(inputs))  # type: ignore[operator]
        taught = {} if self._teacher is None else {"answers": self._teacher.answers(inputs, targets)}
        with self.settings.autocast(device):
            loss, state = runner(inputs, targets, state, reset, padding, documents=batch.told, **taught)
        self._coming.append(state)
        count = int((batch.targets != IGNORED).sum())
        # The loss is the mean of this piece, and gradients are averaged over processes: every token has equal weight.
        scaler.scale(loss * (count * self.share.processes / batch.tokens)).backward()
        nats = (loss.detach() - self._loop.auxiliary_loss).double() * count
        return torch.stack([nats, nats.new_tensor(count)])

    def finish(self, taken: bool) -> None:
        if taken:
            self._states = list(self._coming)
        self._coming = []

    def averages(self, total: Tensor) -> dict[str, float]:
        """Scores of the training tokens, without auxiliary losses of the model."""
        nats, tokens = total.tolist()
        return self.data.scores(nats, tokens)

    def evaluate(self, model: nn.Module, dataset: TextDataset) -> tuple[dict[str, float], list[dict[str, float]]]:
        return evaluate_language(model, dataset, self.world, self.config)

    @classmethod
    def example_inputs(cls, dataset: TextDataset, config: RunConfig) -> Arguments:
        tokens = torch.from_numpy(dataset.tokens[: config.training.segment_length].astype("int64"))
        return (tokens[None],), {}

    def state_dict(self) -> dict[str, Tensor]:
        """The states of all rows in order, over processes and pieces; and the positions of the rows of a stream."""
        places = self.streams.state_dict() if isinstance(self.streams, StreamedRows) else {}
        return self._carried() | {f"{_PLACES}{name}": tensor for name, tensor in places.items()}

    def _carried(self) -> dict[str, Tensor]:
        mine: dict[str, Tensor] = {}
        if self._states[0] is not None:
            parts: list[dict[str, Tensor]] = [dict(named_tensors(state)) for state in self._states]
            mine = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        everyone = [part for part in self.world.gather(mine) if part]
        return {name: torch.cat([part[name] for part in everyone]) for name in (everyone[0] if everyone else ())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the states of the rows of this process (ValueError: another model's states)."""
        places = {name.removeprefix(_PLACES): t for name, t in state.items() if name.startswith(_PLACES)}
        if isinstance(self.streams, StreamedRows) and places:
            self.streams.load_state_dict(places)
        state = {name: tensor for name, tensor in state.items() if not name.startswith(_PLACES)}
        if not state:
            return
        self.model.train()  # the size of a state may depend on the mode
        whole = from_tensors(state, self.model.init_state(self.settings.batch_size), "the checkpoint")  # type: ignore[operator]
        first = self.share.rank * self._rows
        begins = range(first, first + self._rows, self._piece)
        self._states = [map_state(lambda t, b=b: t[b : b + self._piece].clone(), whole) for b in begins]


def make_teacher(model: Any, settings: TrainingConfig) -> StoredTeacher:
    """Return the host of a model as it was pretrained (ValueError: none, or texts beyond its positions)."""
    config: Any = getattr(getattr(model, "model", None), "config", None)
    if not isinstance(model, TransformersModel) or not getattr(config, "name_or_path", ""):
        raise ValueError(f"training.teacher=true: {type(model).__name__} is no pretrained host; set model.pretrained")
    longest, length = getattr(config, "max_position_embeddings", None), settings.segment_length * settings.segments
    if longest is not None and length > longest:
        raise ValueError(
            f"training.segments={settings.segments} of {settings.segment_length} tokens exceed the {longest} positions "
            "of the teacher; take fewer"
        )
    library = require("transformers", extra="language")
    base = library.AutoModelForCausalLM.from_pretrained(config.name_or_path, dtype=model.model.dtype)
    return StoredTeacher(Teacher(base.to(model.model.device)), settings.segment_length)


def _streams(train: TextDataset, settings: TrainingConfig) -> Streams | StreamedRows:
    """The rows of the training split."""
    length, align = settings.segment_length * settings.segments, grain(train, settings.segment_length, settings)
    if settings.teacher and align:
        align = length  # a row of a step is one text to the teacher
    packed, seed = train.reset == "packed", settings.seed if train.shuffle else None
    if isinstance(train, HuggingFaceStream):
        tokenizer: Any = train.tokenizer  # replaced the option of the same name
        options: dict[str, Any] = {"align": align, "packed": packed, "window": train.window, "seed": seed}
        return StreamedRows(train.documents, tokenizer, settings.batch_size, length, **options)
    return Streams(
        train.tokens,
        train.starts,
        train.tokenizer.start,
        settings.batch_size,
        length,
        unit=settings.segment_length,
        align=align,
        packed=packed,
        seed=seed,
    )


def check(config: RunConfig, model: nn.Module, data: TextDataset, scored: TextDataset) -> None:
    """Refuse settings and models that do not suit text (ValueError); `scored` is the validation split."""
    settings = config.training
    if "reset" not in inspect.signature(model.forward).parameters or not hasattr(model, "vocabulary"):
        raise ValueError(f"data {data.name!r} is text; take language_model, not {config.model['name']!r}")
    known = [name for name in ("loss", "perplexity", "bits_per_byte", "word_perplexity") if name in scored.scores(1, 1)]
    if settings.metric not in known:
        raise ValueError(
            f"training.metric={settings.metric!r} does not suit text with tokenizer {data.kind!r}; "
            f"take {', '.join(known)}"
        )
    check_passes(model, settings.passes)
    if data.reset == "packed" and settings.passes > 1:
        raise ValueError(
            f"data.reset=packed with training.passes={settings.passes}: a pass reads whole rows again, across "
            "documents; take data.reset=document, or training.passes=1"
        )
