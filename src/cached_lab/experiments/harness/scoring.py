"""Log-probabilities of continuations given contexts of any length: texts are read segment by segment, rows together.

A text is cut into segments from its first token on, as in training. Whole segments that stand before the first scored
token are read once for all texts that begin with the same ones; their state is all that goes on. Rows of different
lengths stand in one batch: a row that is through reads on in tokens of no meaning, and what it had is kept.

Legend: B rows, N tokens of a segment, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.models.generation import evaluating
from cached_transformers.models.segments import as_language_model, remembers
from cached_transformers.state import State, reorder, reset

FILL = 0
"""Id that stands behind the end of a row."""


class Scored(NamedTuple):
    """A text of which the end is scored.

    Attributes:
        ids: all of its tokens. first: the first of them that is scored, from 1 on.
    """

    ids: Sequence[int]
    first: int


class Score(NamedTuple):
    """Sum of the log-probabilities of the scored tokens (nats), and whether each was the likeliest one."""

    logp: float
    greedy: bool


def log_probabilities(
    model: nn.Module, texts: Sequence[Scored], segment_length: int | None, rows: int
) -> Iterator[tuple[int, Score]]:
    """Score texts, so many rows at a time, and give the place of each in the list with its score, as it is known.

    Args:
        model: a language model of ours, or a decoder of transformers with a memory that has a state.
        segment_length: tokens of a segment, as in training; None reads a text as one, without a memory.

    Raises:
        ValueError: a text of which no token stands before the first scored one, or no `segment_length` for a model
            with a memory.
    """
    if bad := next((text for text in texts if not 1 <= text.first <= len(text.ids)), None):
        raise ValueError(f"first={bad.first} of a text of {len(bad.ids)} tokens must be 1 or more: what is before it?")
    reader: Any = as_language_model(model)
    scored = [place for place, text in enumerate(texts) if text.first < len(text.ids)]
    yield from ((place, Score(0.0, True)) for place in sorted({*range(len(texts))} - {*scored}))
    with evaluating(reader):
        if segment_length is None and remembers(reader.init_state(1)):
            raise ValueError("this model has a memory, which is written once a segment; give segment_length")
        for begins in _batched(_by_beginning(texts, scored, segment_length), rows):
            states = _read_whole(reader, [begin for begin, _ in begins], segment_length)
            places = [(row, place) for row, (_, members) in enumerate(begins) for place in members]
            for batch in _batched(places, rows):
                state = reorder(states, torch.tensor([row for row, _ in batch], device=_device(reader)))
                ends = [_behind(texts[place], len(begins[row][0])) for row, place in batch]
                for (_, place), score in zip(batch, _score(reader, ends, state, segment_length), strict=True):
                    yield place, score


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _batched(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    return [items[begin : begin + count] for begin in range(0, len(items), count)]


def _by_beginning(
    texts: Sequence[Scored], places: Sequence[int], length: int | None
) -> list[tuple[tuple[int, ...], list[int]]]:
    """What texts have in common, whole segments before the first scored token, and the places of those texts; longest
    first, so that rows of a batch are of about the same length."""

    def key(place: int) -> tuple[int, tuple[int, ...]]:
        text = texts[place]
        whole = 0 if length is None else (text.first - 1) // length * length
        return -whole, tuple(text.ids[:whole])

    order = sorted(places, key=lambda place: (*key(place), -len(texts[place].ids)))
    return [(begin, list(members)) for (_, begin), members in itertools.groupby(order, key)]


def _behind(text: Scored, tokens: int) -> Scored:
    """The rest of a text of which so many tokens are read."""
    return Scored(text.ids[tokens:], text.first - tokens)


def _rectangle(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of different lengths as (B, N), filled up."""
    longest = max(map(len, ids))
    return torch.tensor([[*row, *[FILL] * (longest - len(row))] for row in ids], dtype=torch.long, device=device)


@torch.no_grad()
def _read_whole(model: Any, begins: Sequence[tuple[int, ...]], length: int | None) -> State:
    """The state of each row behind its own whole segments."""
    state = kept = model.init_state(len(begins))
    if length is None:
        return kept
    last = {"last_only": True} if getattr(model, "scores_last", False) else {}
    ends_B = torch.tensor([len(begin) // length for begin in begins], device=_device(model))
    for index in range(int(ends_B.max())):
        piece_BN = _rectangle([begin[index * length : (index + 1) * length] for begin in begins], ends_B.device)
        state = model(piece_BN, state, **last).state
        kept = reset(kept, state, ends_B == index + 1)
    return kept


@torch.no_grad()
def _score(model: Any, texts: Sequence[Scored], state: State, length: int | None) -> list[Score]:
    """Scores of texts that begin behind a state, one each row."""
    device = _device(model)
    inputs = [text.ids[:-1] for text in texts]
    targets = [[FILL] * (text.first - 1) + list(text.ids[text.first :]) for text in texts]
    asked_BN = _rectangle([[0] * (t.first - 1) + [1] * (len(t.ids) - t.first) for t in texts], device).bool()
    inputs_BN, targets_BN = _rectangle(inputs, device), _rectangle(targets, device)
    logp_B = torch.zeros(len(texts), dtype=torch.float64, device=device)
    greedy_B = torch.ones(len(texts), dtype=torch.bool, device=device)
    size = length or inputs_BN.shape[1]
    for piece_BN, target_BN, ask_BN in zip(*(t.split(size, 1) for t in (inputs_BN, targets_BN, asked_BN)), strict=True):
        out = model(piece_BN, state)
        state = out.state
        logits_KV, target_K = out.outputs[ask_BN], target_BN[ask_BN]
        logp_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)).log_softmax(-1)
        row_K = ask_BN.nonzero()[:, 0]
        logp_B.index_add_(0, row_K, logp_KV.gather(1, target_K[:, None])[:, 0].double())
        greedy_B[row_K[logp_KV.argmax(-1) != target_K]] = False
    return [Score(float(logp), bool(greedy)) for logp, greedy in zip(logp_B.tolist(), greedy_B.tolist(), strict=True)]
