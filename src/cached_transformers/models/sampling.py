"""How the next token of a text is chosen: the likeliest, or drawn (top-k, nucleus arXiv:1904.09751), or by beams.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one, comparing_lengths


class ChoiceKeywords(TypedDict, total=False):
    """Options that come by keyword, as type checkers know them; see `Choice`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    beams: int
    eos: int | None
    generator: torch.Generator | None
    length_penalty: float
    each: Callable[[Tensor], object] | None


@dataclass(frozen=True)
class Choice:
    """How many tokens are chosen, and how.

    Args:
        tokens: T, the most new tokens.
        temperature: divides the scores before sampling; 0 takes the likeliest token.
        top_k: sample among so many likeliest tokens. top_p: among the fewest that have this probability together,
            counted after `top_k`.
        beams: K; above 1, beam search, which draws nothing. It ends for a row when K continuations of it have met
            `eos` among the K best, and takes the one with the highest log-probability / length ** `length_penalty`.
        eos: token after which a row stops; None for none. All end when every row has.
        generator: for sampling, on the model's device; the same seed gives the same tokens.
        length_penalty: only for beams; 0 compares sums, which favour short texts.
        each: called with the (B,) tokens of every step as soon as they are chosen, to show a text while it grows. Beams
            are chosen at the end, and have no such steps.

    Raises:
        ValueError: an option out of its range, or without effect.
    """

    tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    beams: int = 1
    eos: int | None = None
    generator: torch.Generator | None = None
    length_penalty: float = 1.0
    each: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        at_least_one(tokens=self.tokens, beams=self.beams, top_k=self.top_k)
        temperature, top_p, beams = self.temperature, self.top_p, self.beams
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be finite and not negative; 0 takes the likeliest token")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must lie in (0, 1]; it is the probability that is kept")
        limits = {name: value for name, value in {"top_k": self.top_k, "top_p": top_p}.items() if value is not None}
        if limits and temperature == 0:
            raise ValueError(f"{limits} limits what is drawn, but temperature=0 draws nothing; leave one of them out")
        if beams > 1 and (limits or temperature not in (0.0, 1.0)):
            raise ValueError(
                f"beams={beams} searches and draws nothing: leave out temperature={temperature}"
                + "".join(f" and {name}={value}" for name, value in limits.items())
                + ", or take beams=1"
            )
        comparing_lengths(length_penalty=self.length_penalty)
        if beams == 1 and self.length_penalty != 1.0:
            raise ValueError(f"length_penalty={self.length_penalty} compares beams: take beams=2 or more")
        if self.eos is not None and self.eos < 0:
            raise ValueError(f"eos={self.eos} must be a token id, or None for no end")
        if self.each is not None and beams > 1:
            raise ValueError(f"beams={beams} chooses its tokens at the end; leave out each=..., or take beams=1")

    def check_vocabulary(self, size: int) -> None:
        """Refuse (ValueError) an end that is not among so many tokens."""
        if self.eos is not None and self.eos >= size:
            raise ValueError(f"eos={self.eos} is not in the vocabulary of {size} tokens; None is for no end")

    def token(self, logp_BV: Tensor) -> Tensor:
        """(B): the next token of each row."""
        if self.temperature == 0:
            return logp_BV.argmax(-1)
        probability_BV = keep_likely(logp_BV / self.temperature, self.top_k, self.top_p).softmax(-1)
        return torch.multinomial(probability_BV, 1, generator=self.generator)[:, 0]


def keep_likely(logits_BV: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """The logits, with minus infinity for tokens outside the `top_k` likeliest, then outside the nucleus of `top_p`."""
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kept = logits_BV.topk(top_k, -1)  # by place: of equal tokens no more than k stay
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probability_BV = sorted_BV.softmax(-1)
        rest_BV = probability_BV.cumsum(-1) - probability_BV >= top_p  # those before have it already
        rest_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(torch.zeros_like(rest_BV).scatter(-1, order_BV, rest_BV), -torch.inf)
    return logits_BV
