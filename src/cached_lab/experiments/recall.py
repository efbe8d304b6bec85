"""Questions after long texts, answered by teacher-forced prediction: facts in books, and stories of bAbI (BABILong).

All questions of a text follow each other at its end, each with its right answer, so that one reading gives several
trials. An answer is right if every token of it is the likeliest one. Facts lie in the first `FIRST` tokens; a story's
sentences anywhere before the last segment (arXiv:2406.10149), and each of its persons is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_lab.data.babi import Story, read_stories
from cached_lab.tasks.language.completion import Words
from cached_lab.tasks.language.facts_in_books import ADJECTIVES, DIGITS, NOUNS, STORY_FACTS, fact, told_story
from cached_transformers.integrations.memory_hooks import cache_name
from cached_transformers.integrations.transformers.memory_cache import DynamicCache
from cached_transformers.models.segments import for_loops

from .efficiency import NONE, WHOLE

FIRST, FACTS = 512, 4


class AskedText(NamedTuple):
    """A text that ends with questions and answers.

    Attributes:
        ids: of the whole text. answers: first place and end of each answer among them.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


def asked_facts(words: Words, hay: Sequence[int], length: int, draw: random.Random) -> AskedText:
    """Put facts of held-back nouns into the first tokens of a text, and ask for each at its end."""
    nouns = draw.sample(NOUNS[3::4], FACTS)
    chosen = [(draw.choice(ADJECTIVES), noun, f" {draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)}") for noun in nouns]
    told = [words.encode(f"{fact(*pair)}{number}.") for *pair, number in chosen]
    places = sorted(draw.sample(range(min(FIRST, length // 2)), FACTS))
    pairs = [(fact(*pair), number) for *pair, number in draw.sample(chosen, FACTS)]
    return _asked(words, hay, length, draw, told, lambda room: places, pairs)


def asked_story(words: Words, hay: Sequence[int], length: int, draw: random.Random, story: Story) -> AskedText:
    """Scatter a story over a text, and ask at its end where each person is."""
    sentences, _, _ = told_story(story)
    where = {said[0]: said[-2] for said in story.sentences}  # "mary moved to the bathroom ."
    pairs = [(f" Question: Where is {name.capitalize()}? Answer:", f" {place}") for name, place in where.items()]
    told = [words.encode(sentence) for sentence in sentences]
    return _asked(words, hay, length, draw, told, lambda room: sorted(draw.choices(range(room), k=len(told))), pairs)


def stories_of(babi: Path) -> list[Story]:
    """Return the test stories of qa1 with few sentences."""
    return read_stories(babi, "qa1", "test", STORY_FACTS)


def _asked(
    words: Words,
    hay: Sequence[int],
    length: int,
    draw: random.Random,
    told: Sequence[list[int]],
    places: Callable[[int], list[int]],
    pairs: Sequence[tuple[str, str]],
) -> AskedText:
    """Put sentences at places of a part of a text, and questions with answers after it."""
    questions = [(words.encode(question), words.encode(answer), words.encode(".")) for question, answer in pairs]
    end = sum(len(part) for parts in questions for part in parts)
    room = length - len(words.first) - end - sum(map(len, told))
    if room < max(FIRST, 2 * end) // 2 or room > len(hay):
        raise ValueError(
            f"length={length}: facts and questions take {length - room} tokens; give more, or longer texts"
        )
    start = draw.randrange(len(hay) - room + 1)
    page, ids = list(hay[start : start + room]), [*words.first]
    before = 0
    for place, sentence in zip(places(max(1, room - end)), told, strict=True):
        ids += [*page[before:place], *sentence]
        before = place
    ids += page[before:]
    answers = []
    for question, answer, stop in questions:
        ids += question
        answers.append((len(ids), len(ids) + len(answer)))
        ids += [*answer, *stop]
    return AskedText(ids, answers)


@torch.no_grad()
def right_answers(model: Any, text: AskedText, segment: int, arm: str) -> list[bool]:
    """Return for each question if the model predicts its answer.

    Args:
        model: read in segments of `segment` tokens; for an `arm` without a memory a decoder of transformers, which
            reads the last segments only (`NONE`), or everything with a KV cache (`WHOLE`).
    """
    first, likeliest = text.answers[0][0] - 1, []
    ids_1N = torch.tensor([text.ids], device=next(model.parameters()).device)
    cache, reader = None, None
    begins = [*range(0, ids_1N.shape[1], segment)]
    if arm == NONE:
        begins = [begin for begin in begins if begin + segment > first]
    elif arm == WHOLE:
        cache = DynamicCache(config=model.config)
    else:
        reader, state = for_loops(model).eval(), None
    for begin in begins:
        piece_1N = ids_1N[:, begin : begin + segment]
        asked = begin + segment > first
        if reader is None:
            options: dict[str, Any] = {cache_name(model): cache, "use_cache": cache is not None}
            logits_1NV: Tensor = model(piece_1N, logits_to_keep=0 if asked else 1, **options).logits
        else:
            logits_1NV, state, _ = reader(piece_1N, state, last_only=not asked)
        if asked:
            likeliest.append((begin, logits_1NV[0].argmax(-1).tolist()))
    said = {begin + 1 + place: token for begin, tokens in likeliest for place, token in enumerate(tokens)}
    return [all(said[place] == text.ids[place] for place in range(*answer)) for answer in text.answers]
