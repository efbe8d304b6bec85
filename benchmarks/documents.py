"""Training steps on documents packed into rows, in padded rows of their own, and in rows without document borders.

Lengths of documents follow an exponential distribution; the last document of a row ends with the row, so that all three
ways train on the same tokens. In rows of their own, documents are padded to the longest of the batch.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks import command
from benchmarks.memories import build, random_tokens, spec
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.timing import compare, training_step
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.documents import plan_documents
from cached_transformers.models.segments import cut

BASE = ModelSizes(width=128, depth=2)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memories", default="none,transformer_xl,rmt,infini", help="names separated by commas")
    parser.add_argument("--lengths", type=command.numbers, default=(32, 128, 512), help="mean lengths of documents")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure every memory with documents of every mean length."""
    names, lengths = options.memories.split(","), options.lengths
    rows = [measure_one(name, length, options.rounds, options.device) for name in names for length in lengths]
    columns = {
        "memory": lambda row: row["memory"],
        "mean length": lambda row: str(row["length"]),
        "documents": lambda row: str(row["documents"]),
        "packed, time": lambda row: str(row["packed"]),
        "rows of their own, time": lambda row: str(row["padded"]),
        "packed, tokens": lambda row: f"{row['packed_tokens']:.2f}",
        "rows of their own, tokens": lambda row: f"{row['padded_tokens']:.2f}",
    }
    return command.Result(rows, command.columns_table(rows, columns))


def documents_of(sizes: ModelSizes, length: int) -> Tensor:
    """Return ids (B, N) of documents with `length` tokens on average, which fill all rows; the same at every call."""
    tokens = sizes.segment * sizes.segments
    generator = torch.Generator().manual_seed(0)
    lengths_BK = torch.empty(sizes.rows, tokens).exponential_(1 / length, generator=generator).ceil().long()
    ends_BK = lengths_BK.cumsum(1).contiguous()
    return torch.searchsorted(ends_BK, torch.arange(tokens).expand(sizes.rows, -1).contiguous(), right=True)


def measure_one(memory: str, length: int, rounds: int, device: str) -> command.Measurement:
    """Time a training step in each way, with the gradient across all segments.

    Ratios are to rows without document borders; `packed_tokens` and `padded_tokens` are computed over real tokens.
    """
    sizes = BASE
    model = build(None if memory == "none" else spec(memory, sizes), sizes).to(device)
    tokens, ids_BN = random_tokens(sizes), documents_of(sizes, length)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :-1][ids_BN.diff() != 0] = IGNORED  # the next document's first token is no target
    lengths = [n for ids_N in ids_BN for n in ids_N.unique_consecutive(return_counts=True)[1].tolist()]
    parts = [list(t.flatten().split(lengths)) for t in (inputs, targets)]
    own_inputs, own_targets = (pad_sequence(part, batch_first=True).to(device) for part in parts)
    padding = torch.arange(own_inputs.shape[1], device=device) >= torch.tensor(lengths, device=device)[:, None]
    loop = SegmentLoop(model, sizes.segment, bptt=sizes.segments)
    inputs, targets = inputs.to(device), targets.to(device)

    def loss(*given: Tensor, **more: Tensor) -> Tensor:
        return loop(*given, **more)[0]  # type: ignore[no-any-return]

    ways = {
        "undivided": partial(loss, inputs, targets),
        "packed": partial(loss, inputs, targets, documents=ids_BN),
        "padded": partial(loss, own_inputs, own_targets, padding=padding),
    }
    ratios = compare({name: training_step(model, way) for name, way in ways.items()}, "undivided", rounds)
    plans = [plan_documents(ids_BN[:, part]) for part in cut(ids_BN.shape[1], sizes.segment)]
    computed = sum(sizes.rows * sizes.segment if plan is None else plan.computed for plan in plans)
    return {
        "memory": memory,
        "length": length,
        "documents": len(lengths),
        "packed": ratios["packed"],
        "padded": ratios["padded"],
        "packed_tokens": computed / ids_BN.numel(),
        "padded_tokens": padding.numel() / ids_BN.numel(),
    }


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
