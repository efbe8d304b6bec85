"""Log-probabilities of continuations given contexts of any length, by segments, several rows at once.

A text is split into segments from its first token on, as in training. Whole segments before the first scored token are
processed once for all texts that share them; the rest continues from their state. Rows of a batch may have different
lengths: shorter rows are filled up, and the results of the filler are ignored.

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


class ScoredText(NamedTuple):
    """Token ids, and the index (1 or more) of the first scored one."""

    ids: Sequence[int]
    first: int


class TextScore(NamedTuple):
    """Sum of the log-probabilities of the scored tokens (nats); `greedy` if each was the likeliest token."""

    logp: float
    greedy: bool


def log_probabilities(
    model: nn.Module, texts: Sequence[ScoredText], segment_length: int | None, rows: int
) -> Iterator[tuple[int, TextScore]]:
    """Score texts, `rows` at a time; yield the index and score of each as soon as it is known.

    Args:
        model: a language model of ours, or a decoder of transformers with a stateful memory.
        segment_length: tokens of a segment, as in training; None processes a text as one segment, without a memory.

    Raises:
        ValueError: a text without a token before the first scored one; no `segment_length` for a model with a memory.
    """
    if bad := next((text for text in texts if not 1 <= text.first <= len(text.ids)), None):
        raise ValueError(f"first={bad.first} must be 1 or more and at most the text's {len(bad.ids)} tokens")
    reader: Any = as_language_model(model)
    device = next(reader.parameters()).device
    yield from ((index, TextScore(0.0, True)) for index, text in enumerate(texts) if text.first == len(text.ids))

    def whole_segments(index: int) -> tuple[int, ...]:
        text = texts[index]
        return tuple(text.ids[: 0 if segment_length is None else (text.first - 1) // segment_length * segment_length])

    def order(index: int) -> tuple[int, tuple[int, ...], int]:  # longest first, so that a batch has similar lengths
        return -len(whole_segments(index)), whole_segments(index), -len(texts[index].ids)

    scored = sorted((index for index, text in enumerate(texts) if text.first < len(text.ids)), key=order)
    groups = [(start, list(members)) for start, members in itertools.groupby(scored, whole_segments)]
    with evaluating(reader), torch.no_grad():
        if segment_length is None and remembers(reader.init_state(1)):
            raise ValueError("segment_length=None: the memory of this model is written per segment; give a length")
        for part in _batches(groups, rows):
            states = _states_after(reader, [start for start, _ in part], segment_length, device)
            for batch in _batches([(row, index) for row, (_, members) in enumerate(part) for index in members], rows):
                state = reorder(states, torch.tensor([row for row, _ in batch], device=device))
                done = [len(part[row][0]) for row, _ in batch]
                rest = [texts[index] for _, index in batch]
                rest = [ScoredText(t.ids[n:], t.first - n) for t, n in zip(rest, done, strict=True)]
                yield from zip((i for _, i in batch), _score(reader, rest, state, segment_length, device), strict=True)


def _batches(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    return [items[begin : begin + count] for begin in range(0, len(items), count)]


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Fill rows up with zeros to (B, N)."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long, device=device)


def _states_after(model: Any, starts: Sequence[tuple[int, ...]], length: int | None, device: torch.device) -> State:
    """Return the state of each row after its own whole segments."""
    state = kept = model.init_state(len(starts))
    if length is None:
        return kept
    last = {"last_only": True} if getattr(model, "scores_last", False) else {}
    ends_B = torch.tensor([len(start) // length for start in starts], device=device)
    for index in range(int(ends_B.max())):
        segment_BN = _rectangle([start[index * length : (index + 1) * length] for start in starts], device)
        state = model(segment_BN, state, **last).state
        kept = reset(kept, state, ends_B == index + 1)
    return kept


def _score(
    model: Any, texts: Sequence[ScoredText], state: State, length: int | None, device: torch.device
) -> list[TextScore]:
    """Score texts that continue from a state, one per row."""
    inputs_BN = _rectangle([text.ids[:-1] for text in texts], device)
    targets_BN = _rectangle([text.ids[1:] for text in texts], device)
    scored_BN = _rectangle([[0] * (t.first - 1) + [1] * (len(t.ids) - t.first) for t in texts], device).bool()
    logp_B = torch.zeros(len(texts), dtype=torch.float64, device=device)
    greedy_B = torch.ones(len(texts), dtype=torch.bool, device=device)
    parts = (t.split(length or inputs_BN.shape[1], 1) for t in (inputs_BN, targets_BN, scored_BN))
    for segment_BN, target_BN, mask_BN in zip(*parts, strict=True):
        out = model(segment_BN, state)
        state = out.state
        logits_KV, target_K = out.outputs[mask_BN], target_BN[mask_BN]
        logp_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)).log_softmax(-1)
        row_K = mask_BN.nonzero()[:, 0]
        logp_B.index_add_(0, row_K, logp_KV.gather(1, target_K[:, None])[:, 0].double())
        greedy_B[row_K[logp_KV.argmax(-1) != target_K]] = False
    return [TextScore(*pair) for pair in zip(logp_B.tolist(), greedy_B.tolist(), strict=True)]
