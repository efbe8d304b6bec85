"""Scores of a language model over a whole split, with each row's memory kept, emptied, or exchanged between rows.

Losses are summed by position in the document, by position in the segment, by the segments that the memory has read, by
document, and by segment of each row. The last two give intervals (`experiments/memory_use.py`): two treatments of the
memory predict the same tokens, so that they can be paired.

Legend: B rows, N tokens of a step, S segments of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cached_lab.data.samples import is_stream
from cached_lab.data.text import TextDataset
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.metrics import untouched
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.segments import model_memory, remembers
from cached_transformers.state import State, last_use, reorder

from .streams import IGNORED, StreamBatch, Streams, grain

BUCKETS = 48
"""Buckets of numbers from 0 on, by powers of two: the last one begins at 2^47 - 1."""
QUARTERS = 4
"""Parts of a segment."""


class SplitLosses(NamedTuple):
    """Summed losses (nats) and numbers of tokens of a split, (2, parts) float64 each, on the CPU.

    Attributes:
        places: by position in the document, 0, 1 to 2, 3 to 6, ...
        quarters: by position in the segment.
        carried: by the segments that the row had read since it was reset, 0, 1 to 2, 3 to 6, ...
        documents: by document.
        segments: by row and segment, (2, B, S).
    """

    places: Tensor
    quarters: Tensor
    carried: Tensor
    documents: Tensor
    segments: Tensor

    def scores(self, dataset: TextDataset) -> dict[str, float]:
        """Scores of the whole split."""
        nats, tokens = self.places.sum(1).tolist()
        return dataset.scores(nats, tokens)


def by_powers(sums: Tensor) -> list[dict[str, Any]]:
    """Buckets that hold tokens, from a tensor (2, BUCKETS): {"from", "to", "tokens", "loss"}."""
    found = [(2**p - 1, 2 ** (p + 1) - 2, *pair) for p, pair in enumerate(sums.T.tolist())]
    return [{"from": a, "to": b, "tokens": int(n), "loss": nats / n} for a, b, nats, n in found if n]


def evaluation_streams(dataset: TextDataset, config: RunConfig) -> Streams:
    """A split from beginning to end, in the rows of an evaluation batch (ValueError: a stream has no end)."""
    if is_stream(dataset):
        raise ValueError(
            f"split {dataset.split!r} of data {dataset.name!r} is read as a stream, which has no end; score validation "
            "or test, which are held in memory"
        )
    settings = config.training
    length = segment_length(config)
    window = settings.segments if settings.passes > 1 else 1
    return Streams(
        dataset.tokens,
        dataset.starts,
        dataset.tokenizer.start,
        settings.evaluation_rows,
        length * window,
        unit=length,
        align=grain(dataset, length, settings),
        packed=dataset.reset == "packed",
    )


def segment_length(config: RunConfig) -> int:
    """Tokens in a segment of an evaluation."""
    return config.evaluation.segment_length or config.training.segment_length


def evaluate_language(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Scores over a whole split, from `split_losses`, and the loss by position in the document."""
    losses = split_losses(model, dataset, world, config)
    return losses.scores(dataset), by_powers(losses.places)


def split_losses(model: nn.Module, dataset: TextDataset, world: World, config: RunConfig) -> SplitLosses:
    """The losses of a whole split, every token once, in evaluation mode and float32.

    The split is read in order, in rows that keep their memory from segment to segment ("carry"), lose it before each
    ("reset"), or get that of another row ("shuffle"), according to `config.evaluation.memory`. Processes share the
    rows.

    Raises:
        ValueError: shuffling with a single row, or several passes over a model whose memory would show the answers.
    """
    streams, length = evaluation_streams(dataset, config), segment_length(config)
    rows = own_rows(streams, world)
    first, last = rows.start, rows.stop
    if config.evaluation.memory == "shuffle" and last - first == 1:
        raise ValueError("evaluation.memory=shuffle needs two rows or more; raise training.evaluation_batch_size")
    check_passes(model, config.training.passes)
    segments = -(-streams.steps * streams.length // length)
    sizes = (BUCKETS, QUARTERS, BUCKETS, len(dataset.starts), streams.rows * segments)
    totals = [torch.zeros(2, size, dtype=torch.float64, device=world.device) for size in sizes]
    rows_B1 = torch.arange(first, last)[:, None] * segments
    read_B1 = torch.zeros(last - first, 1, dtype=torch.long)
    begun = 0
    with untouched(model):
        for batch, losses_BN in read_rows(model, streams, rows, world, config):
            segment_N = torch.arange(losses_BN.shape[1]) // length
            read_B1 = read_B1.masked_fill(batch.reset[:, :1], 0)
            carried_BN = read_B1 + segment_N
            if batch.packed:  # since its document began, in this row
                place_N = begun * length + torch.arange(len(segment_N))
                carried_BN = place_N // length - (place_N - batch.positions).clamp(min=0) // length
            parts = (
                _power(batch.positions),
                (torch.arange(len(segment_N)) % length * QUARTERS // length)[None],
                _power(carried_BN),
                batch.documents,
                rows_B1 + begun + segment_N,
            )
            valid_BN = batch.targets != IGNORED
            values = losses_BN[valid_BN.to(world.device)].double()
            for total, part in zip(totals, parts, strict=True):
                index = part.expand_as(valid_BN)[valid_BN].to(world.device)
                total[0].index_add_(0, index, values)
                total[1].index_add_(0, index, torch.ones_like(values))
            count = int(segment_N[-1]) + 1
            read_B1, begun = read_B1 + count, begun + count
    places, quarters, carried, documents, by_segment = (world.sum(total).cpu() for total in totals)
    return SplitLosses(places, quarters, carried, documents, by_segment.view(2, streams.rows, -1))


def own_rows(streams: Streams, world: World) -> slice:
    """The rows of a process."""
    return slice(*(rank * streams.rows // world.size for rank in (world.rank, world.rank + 1)))


def read_rows(
    model: nn.Module, streams: Streams, rows: slice, world: World, config: RunConfig
) -> Iterator[tuple[StreamBatch, Tensor]]:
    """Each batch of some rows with its losses (B, N), the memory treated according to `config.evaluation.memory`."""
    loop = SegmentLoop(model, segment_length(config), passes=config.training.passes)
    memory, count = config.evaluation.memory, rows.stop - rows.start
    generator = torch.Generator().manual_seed(config.training.seed)
    state: State | None = None
    for step in range(streams.steps if count else 0):
        batch = streams.batch(step, rows)
        inputs_BN, targets_BN, reset, padding_BN = batch.moved(world.device)
        if memory == "reset":
            reset = torch.ones_like(reset)
        elif memory == "shuffle" and state is not None:
            shift = int(torch.randint(1, count, (), generator=generator))
            state = reorder(state, torch.arange(count, device=world.device).roll(shift))
        with last_use(state if config.training.passes == 1 else None):
            outs = list(loop.read(inputs_BN, targets_BN, state, reset, padding_BN, documents=batch.told))
        state = outs[-1].state
        yield batch, torch.cat([out.outputs for out in outs], 1)


def _power(numbers: Tensor) -> Tensor:
    """The bucket of numbers from 0 on: 0, 1 to 2, 3 to 6, ..."""
    return torch.from_numpy(np.frexp(numbers.numpy() + 1)[1] - 1).long()


def check_passes(model: nn.Module, passes: int) -> None:
    """Refuse several passes over text whose next tokens a memory has already read (ValueError)."""
    if passes == 1:
        return
    memory = model_memory(model, passes)
    if not memory.rereads and remembers(model.init_state(1)):  # type: ignore[operator]
        raise ValueError(
            f"training.passes={passes}: after the first pass the memory has read the tokens to be predicted; "
            "take training.passes=1, or a memory that shows a token only earlier tokens in every pass "
            "(read_twice with scope='earlier')"
        )
