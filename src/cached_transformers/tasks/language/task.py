"""Language modelling: streams of text, a state carried from step to step and saved with the run, and its scores.

Legend: B rows, N tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cached_transformers.data.text import TextDataset
from cached_transformers.models.segments import model_memory, remembers
from cached_transformers.state import State, from_tensors, last_use, map_state, named_tensors, reorder
from cached_transformers.training.config import RunConfig
from cached_transformers.training.distributed import World, wrap
from cached_transformers.training.loader import to_device
from cached_transformers.training.metrics import untouched
from cached_transformers.training.run_files import TOKENIZER, check_tokenizer
from cached_transformers.training.segments import SegmentLoop
from cached_transformers.training.settings import TrainingConfig
from cached_transformers.training.task import Arguments, Task

from .streams import IGNORED, StreamBatch, Streams

BUCKETS = 48  # the last one begins at place 2^47 - 1


class LanguageModelling(Task):
    """Next-token prediction over streams; each row keeps its place in the text, and its memory, from step to step.

    A step reads `segments` segments of every row. The rows of a batch are divided over processes and accumulated
    pieces, each with its own part of the state. A step that is skipped leaves the state as it was before.

    Raises:
        ValueError: settings or a model that do not suit text.
    """

    width = 2

    def __init__(
        self, config: RunConfig, model: nn.Module, train: TextDataset, validation: TextDataset, world: World
    ) -> None:
        super().__init__(config, model, train, validation, world)
        check(config, model, train)
        settings = self.settings
        self.share.check(settings.batch_size)
        length = settings.segment_length * settings.segments
        if settings.batch_size * length > len(train):
            raise ValueError(
                f"training.batch_size={settings.batch_size} rows of training.segments={settings.segments} x "
                f"training.segment_length={settings.segment_length} tokens exceed the {len(train)} tokens of the text; "
                "take fewer or shorter rows"
            )
        self.streams = Streams(
            train.tokens,
            train.starts,
            train.tokenizer.start,
            settings.batch_size,
            length,
            unit=settings.segment_length,
            align=_grain(train, settings.segment_length, settings),
            seed=settings.seed if train.shuffle else None,
        )
        evaluation_streams(validation, config)  # refuses too many rows now and not after the first hours
        self._rows = settings.batch_size // world.size
        self._piece = self._rows // settings.accumulate
        self._states: list[State | None] = [None] * settings.accumulate
        self._coming: list[State] = []

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        settings = self.settings
        # One graph serves every segment, so the model is compiled and not the loop round it.
        model = torch.compile(self.model) if settings.compile else self.model
        loop = SegmentLoop(model, settings.segment_length, settings.bptt, settings.passes)  # type: ignore[arg-type]
        self._loop, wrapped = loop, wrap(loop, self.world)
        return wrapped, wrapped

    def batches(self, step: int) -> Iterator[StreamBatch]:
        first = self.world.rank * self._rows
        while True:
            for begin in range(first, first + self._rows, self._piece):
                yield self.streams.batch(step, slice(begin, begin + self._piece))
            step += 1

    def backward(self, runner: Callable[..., Any], batch: StreamBatch, scaler: torch.amp.GradScaler) -> Tensor:
        device, state = self.world.device, self._states[len(self._coming)]
        inputs, targets, reset, padding = moved(batch, device)
        if state is None:
            state = self.model.init_state(len(inputs))  # type: ignore[operator]
        with self.settings.autocast(device):
            loss, state = runner(inputs, targets, state, reset, padding)
        self._coming.append(state)
        count = int((batch.targets != IGNORED).sum())
        # The loss is the mean of this piece, and gradients are averaged over processes: every token weighs alike.
        scaler.scale(loss * (count * self.world.size / batch.tokens)).backward()
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

    def files(self) -> dict[str, bytes]:
        return {TOKENIZER: self.data.tokenizer.dump()}

    def check_continued(self, folder: Path) -> None:
        check_tokenizer(folder, self.data.tokenizer)

    def state_dict(self) -> dict[str, Tensor]:
        """The states of all rows, in order of the rows, whatever processes and pieces they belong to."""
        if self._states[0] is None:
            return {}
        parts: list[dict[str, Tensor]] = [dict(named_tensors(state)) for state in self._states]
        mine = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        everyone = self.world.gather(mine)
        return {name: torch.cat([part[name] for part in everyone]) for name in mine}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up the states of the rows of this process (ValueError: they are of another model)."""
        if not state:
            return
        self.model.train()  # the size of a state may depend on the mode
        whole = from_tensors(state, self.model.init_state(self.settings.batch_size), "the checkpoint")  # type: ignore[operator]
        first = self.world.rank * self._rows
        begins = range(first, first + self._rows, self._piece)
        self._states = [map_state(lambda t, b=b: t[b : b + self._piece].clone(), whole) for b in begins]


def check(config: RunConfig, model: nn.Module, data: TextDataset) -> None:
    """Refuse settings and models that do not suit text (ValueError)."""
    settings, size = config.training, data.tokenizer.vocabulary
    if "reset" not in inspect.signature(model.forward).parameters or not hasattr(model, "vocabulary"):
        raise ValueError(
            f"data {data.name!r} is text, for which model {config.model['name']!r} is none; take language_model"
        )
    if model.vocabulary < size:  # type: ignore[operator]
        raise ValueError(
            f"model.vocabulary={model.vocabulary} is below the {size} token ids of the data; leave it out, or raise it"
        )
    known = [name for name in ("loss", "perplexity", "bits_per_byte", "word_perplexity") if name in data.scores(1, 1)]
    if settings.metric not in known:
        raise ValueError(
            f"training.metric={settings.metric!r} does not suit text with tokenizer {data.kind!r}; "
            f"take {', '.join(known)}"
        )
    if settings.label_smoothing:
        raise ValueError(f"training.label_smoothing={settings.label_smoothing} is not for text; leave it at 0")
    check_passes(model, settings.passes)


def check_passes(model: nn.Module, passes: int) -> None:
    """Refuse several passes over text whose next tokens a memory has read by then (ValueError)."""
    if passes == 1:
        return
    memory = model_memory(model, passes)
    if not memory.rereads and remembers(model.init_state(1)):  # type: ignore[operator]
        raise ValueError(
            f"training.passes={passes}: after the first pass the memory has read the tokens that are to be predicted; "
            "take training.passes=1, or a memory that shows a token only what stands before it in every pass "
            "(read_twice with scope='earlier')"
        )


def moved(batch: StreamBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Inputs, targets, resets and padding on a device."""
    return to_device((batch.inputs, batch.targets, batch.reset, batch.padding), device)


def _grain(data: TextDataset, segment: int, settings: TrainingConfig) -> int:
    """Multiples of how many tokens documents begin at: of a segment, or of all that several passes read."""
    if data.reset != "document":
        return 0
    return segment * settings.segments if settings.passes > 1 else segment


def evaluation_streams(dataset: TextDataset, config: RunConfig) -> Streams:
    """A split from beginning to end, in as many rows as an evaluation batch has."""
    settings = config.training
    length = config.evaluation.segment_length or settings.segment_length
    window = settings.segments if settings.passes > 1 else 1
    return Streams(
        dataset.tokens,
        dataset.starts,
        dataset.tokenizer.start,
        settings.evaluation_rows,
        length * window,
        unit=length,
        align=_grain(dataset, length, settings),
    )


def evaluate_language(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Scores over a whole split, every token once, in evaluation mode and float32; and the loss by place.

    The split is read in order, in rows that keep their memory from segment to segment ("carry"), forget it before each
    ("reset"), or get that of another row ("shuffle"), as `config.evaluation.memory` says. Processes share the rows.

    Returns:
        The scores; and for places 0, 1 to 2, 3 to 6, 7 to 14, ... in the document: from, to, tokens, loss.

    Raises:
        ValueError: shuffling with a single row, or several passes over a model whose memory would show the answers.
    """
    streams, memory = evaluation_streams(dataset, config), config.evaluation.memory
    length = config.evaluation.segment_length or config.training.segment_length
    first, last = (rank * streams.rows // world.size for rank in (world.rank, world.rank + 1))
    if memory == "shuffle" and last - first == 1:
        raise ValueError("evaluation.memory=shuffle needs two rows or more; raise training.evaluation_batch_size")
    check_passes(model, config.training.passes)
    loop = SegmentLoop(model, length, passes=config.training.passes)
    generator = torch.Generator().manual_seed(config.training.seed)
    total = torch.zeros(2, BUCKETS, dtype=torch.float64, device=world.device)
    with untouched(model):
        state: State | None = None
        for step in range(streams.steps if last > first else 0):
            batch = streams.batch(step, slice(first, last))
            if memory == "reset":
                batch = batch._replace(reset=torch.ones_like(batch.reset))
            elif memory == "shuffle" and state is not None:
                shift = int(torch.randint(1, last - first, (), generator=generator))
                state = reorder(state, torch.arange(last - first, device=world.device).roll(shift))
            inputs_BN, targets_BN, reset, padding_BN = moved(batch, world.device)
            with last_use(state if config.training.passes == 1 else None):
                outs = list(loop.read(inputs_BN, targets_BN, state, reset, padding_BN))
            losses_BN, state = torch.cat([out.outputs for out in outs], 1), outs[-1].state
            bucket_BN = torch.from_numpy(np.frexp(batch.positions.numpy() + 1)[1] - 1).long()
            valid_BN = batch.targets != IGNORED
            index = bucket_BN[valid_BN].to(world.device)
            values = losses_BN[valid_BN.to(world.device)].double()
            total[0].index_add_(0, index, values)
            total[1].index_add_(0, index, torch.ones_like(values))
    nats_P, tokens_P = world.sum(total).cpu()
    places = [
        {"from": 2**p - 1, "to": 2 ** (p + 1) - 2, "tokens": int(tokens_P[p]), "loss": float(nats_P[p] / tokens_P[p])}
        for p in range(BUCKETS)
        if tokens_P[p]
    ]
    return dataset.scores(float(nats_P.sum()), float(tokens_P.sum())), places
