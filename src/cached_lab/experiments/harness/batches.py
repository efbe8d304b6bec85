"""Score and continue texts of any length by segments, several rows at once.

A text is split into segments from its first token on, as in training. Scored rows may have different lengths: shorter
rows are filled up, and the results of the filler are ignored. Continued rows have equal lengths.

Legend: B rows, N tokens of a segment, K scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.tasks.language.completion import CONTEXT, Words
from cached_transformers.models.generation import GeneratedText, evaluating
from cached_transformers.models.sampling import Choice
from cached_transformers.models.segments import as_language_model, remembers

ScoredText = tuple[Sequence[int], int]
"""Token ids, and the index (1 or more) of the first scored one."""
TextScore = tuple[float, bool]
"""Sum of the log-probabilities of the scored tokens (nats), and True if each was the likeliest token."""


@torch.no_grad()
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
    for ids, first in texts:
        if not 1 <= first <= len(ids):
            raise ValueError(f"first={first} must be 1 or more and at most the text's {len(ids)} tokens")
    reader: Any = as_language_model(model)
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index][0]))  # a batch has similar lengths
    with evaluating(reader):
        if segment_length is None and remembers(reader.init_state(1)):
            raise ValueError("segment_length=None: the memory of this model is written per segment; give a length")
        for begin in range(0, len(order), rows):
            batch = order[begin : begin + rows]
            yield from zip(batch, _score(reader, [texts[index] for index in batch], segment_length), strict=True)


def _score(model: Any, texts: Sequence[ScoredText], length: int | None) -> list[TextScore]:
    device = next(model.parameters()).device
    longest = max(2, *(len(ids) for ids, _ in texts))

    def rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)

    ids_BN = rectangle([ids for ids, _ in texts])
    scored_BN = rectangle([[0] * first + [1] * (len(ids) - first) for ids, first in texts]).bool()
    logp_B = torch.zeros(len(texts), dtype=torch.float64, device=device)
    greedy_B = torch.ones(len(texts), dtype=torch.bool, device=device)
    state = model.init_state(len(texts))
    last_only = {"last_only": True} if getattr(model, "scores_last", False) else {}
    parts = (t.split(length or longest, 1) for t in (ids_BN[:, :-1], ids_BN[:, 1:], scored_BN[:, 1:]))
    for inputs_BN, targets_BN, asked_BN in zip(*parts, strict=True):
        asked = bool(asked_BN.any())
        out = model(inputs_BN, state, **({} if asked else last_only))
        state = out.state
        if asked:
            logits_KV, target_K = out.outputs[asked_BN], targets_BN[asked_BN]
            logp_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)).log_softmax(-1)
            row_K = asked_BN.nonzero()[:, 0]
            logp_B.index_add_(0, row_K, logp_KV.gather(1, target_K[:, None])[:, 0].double())
            greedy_B[row_K[logp_KV.argmax(-1) != target_K]] = False
    return list(zip(logp_B.tolist(), greedy_B.tolist(), strict=True))


@torch.no_grad()
def generate_until(
    model: nn.Module,
    contexts: Sequence[Sequence[int]],
    words: Words,
    segment_length: int | None,
    choice: Choice,
    until: Sequence[str],
) -> list[str]:
    """Continue contexts with equal numbers of tokens, each up to a string, the tokenizer's end, or the last token.

    Args:
        model, segment_length: as for `generate`. choice: sampling options, with one beam.
        until: strings that end a text and do not belong to it.
    """
    reader = as_language_model(model)
    with evaluating(reader):
        prompt_BN = torch.tensor([list(context) for context in contexts], device=next(reader.parameters()).device)
        text = GeneratedText(reader, prompt_BN, reader.init_state(len(contexts)), segment_length)
        rows: list[list[int]] = [[] for _ in contexts]
        for index in range(choice.tokens):
            token_B = choice.token(text.read())
            for row, token in zip(rows, token_B.tolist(), strict=True):
                row.append(token)
            ended = [ended_text(words, before, row, until) for before, row in zip(contexts, rows, strict=True)]
            if index + 1 == choice.tokens or all(done for _, done in ended):
                break
            text.append(token_B)
    return [string for string, _ in ended]


def ended_text(words: Words, before: Sequence[int], ids: Sequence[int], until: Sequence[str]) -> tuple[str, bool]:
    """Return the text of ids after a context up to its end, and True if it has one."""
    done, context = words.end in ids, list(before[-CONTEXT:])
    upto = ids[: ids.index(words.end)] if words.end is not None and done else ids
    text = words.decode([*context, *upto])[len(words.decode(context)) :]
    found = [place for string in until if (place := text.find(string)) >= 0]
    return (text[: min(found)], True) if found else (text, done)
