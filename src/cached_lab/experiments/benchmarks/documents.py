"""Training steps on documents packed into rows, beside the same documents in padded rows of their own, and beside rows
that are read on over the ends of documents.

Documents are as long as an exponential distribution has them, the last of a row cut where the row ends, so that all
three ways train on the same tokens. In rows of their own, documents are padded to the longest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cached_lab.experiments.reports.markdown import table
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.documents import plan_documents
from cached_transformers.models.segments import cut

from .interleaved import Ratio, compare, training_step
from .memories import build, spec
from .peers import Sizes, random_tokens

MEMORIES = ("none", "transformer_xl", "rmt", "infini")
LENGTHS = (32, 128, 512)
BASE = Sizes(width=128, depth=2)


@dataclass(frozen=True)
class Row:
    """One memory and mean length of documents; ratios are over the same tokens read on without documents.

    Attributes:
        documents: in a batch. packed, padded: time of a training step.
        packed_tokens, padded_tokens: tokens that are computed, over those that there are.
    """

    memory: str
    length: int
    documents: int
    packed: Ratio
    padded: Ratio
    packed_tokens: float
    padded_tokens: float


def documents_of(sizes: Sizes, length: int) -> Tensor:
    """Ids (B, N) of documents of so many tokens on average, which fill all rows; the same at every call."""
    tokens = sizes.segment * sizes.segments
    generator = torch.Generator().manual_seed(0)
    lengths_BK = torch.empty(sizes.rows, tokens).exponential_(1 / length, generator=generator).ceil().long()
    ends_BK = lengths_BK.cumsum(1).contiguous()
    return torch.searchsorted(ends_BK, torch.arange(tokens).expand(sizes.rows, -1).contiguous(), right=True)


def measure(memory: str, length: int, sizes: Sizes, rounds: int, device: str = "cpu") -> Row:
    """A training step in each of the three ways, with the gradient across all segments."""
    model = build(None if memory == "none" else spec(memory, sizes), sizes).to(device)
    tokens, ids_BN = random_tokens(sizes), documents_of(sizes, length)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :-1][ids_BN.diff() != 0] = IGNORED  # what follows a document's last token is no part of it
    lengths = [n for ids_N in ids_BN for n in ids_N.unique_consecutive(return_counts=True)[1].tolist()]
    alone, asked = (
        pad_sequence(list(t.flatten().split(lengths)), batch_first=True).to(device) for t in (inputs, targets)
    )
    padding = torch.arange(alone.shape[1], device=device) >= torch.tensor(lengths, device=device)[:, None]
    loop = SegmentLoop(model, sizes.segment, bptt=sizes.segments)
    inputs, targets = inputs.to(device), targets.to(device)

    def loss(*given: Tensor, **more: Tensor) -> Tensor:
        return loop(*given, **more)[0]  # type: ignore[no-any-return]

    ways = {
        "undivided": partial(loss, inputs, targets),
        "packed": partial(loss, inputs, targets, documents=ids_BN),
        "padded": partial(loss, alone, asked, padding=padding),
    }
    ratios = compare({name: training_step(model, way) for name, way in ways.items()}, "undivided", rounds)
    plans = [plan_documents(ids_BN[:, part]) for part in cut(ids_BN.shape[1], sizes.segment)]
    computed = sum(sizes.rows * sizes.segment if plan is None else plan.computed for plan in plans)
    count = ids_BN.numel()
    counts = (computed / count, padding.numel() / count)
    return Row(memory, length, len(lengths), ratios["packed"], ratios["padded"], *counts)


def run(rounds: int, device: str, memories: Sequence[str] = MEMORIES, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Every memory with documents of every mean length."""
    return [measure(memory, length, BASE, rounds, device) for memory in memories for length in lengths]


def as_markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["memory", "mean length", "documents", "packed, time", "rows of their own, time", "packed, tokens"]
    return table(
        [*head, "rows of their own, tokens"],
        [
            [
                *(r.memory, str(r.length), str(r.documents), str(r.packed), str(r.padded)),
                *(f"{r.packed_tokens:.2f}", f"{r.padded_tokens:.2f}"),
            ]
            for r in rows
        ],
    )
