"""Sampling options: greedy, sampled (top-k, nucleus arXiv:1904.09751), or beam search.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from cached_transformers.annotations import checked
from cached_transformers.checks import comparing_lengths


class ChoiceKeywords(TypedDict, total=False):
    """Keyword options of `generate` for type checkers; see `Choice`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    beams: int
    eos: int | None
    generator: torch.Generator | None
    length_penalty: float
    each: Callable[[Tensor], object] | None


@checked
@dataclass(frozen=True)
class Choice:
    """Sampling options of a generated text.

    Args:
        tokens: T, maximum of new tokens.
        temperature: divides the scores before sampling; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens. top_p: sample among the fewest tokens with this total probability,
            after `top_k`.
        beams: K; above 1, beam search without sampling. It ends for a row when K continuations have reached `eos` among
            the K best, and takes the highest log-probability / length ** `length_penalty`.
        eos: token after which a row stops; None for none.
        generator: for sampling, on the model's device; the same seed gives the same tokens.
        length_penalty: for beams; 0 compares sums, which favour short texts.
        each: called with the (B,) tokens of every step, to stream a text; not for beams.

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
        temperature, top_p, beams = self.temperature, self.top_p, self.beams
        if temperature < 1e-30 and temperature != 0:
            raise ValueError(f"temperature={temperature} must be at least 1e-30, or 0, which takes the likeliest token")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must lie in (0, 1]: it is a probability")
        limits = {name: value for name, value in {"top_k": self.top_k, "top_p": top_p}.items() if value is not None}
        if limits and temperature == 0:
            raise ValueError(f"{limits} limits sampling, but temperature=0 samples nothing; leave one of them out")
        if beams > 1 and (limits or temperature not in (0.0, 1.0)):
            raise ValueError(
                f"beams={beams} searches without sampling: leave out temperature={temperature}"
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
        """Refuse (ValueError) an `eos` outside a vocabulary of `size` tokens."""
        if self.eos is not None and self.eos >= size:
            raise ValueError(f"eos={self.eos} is not in the vocabulary of {size} tokens; take a token id, or None")

    def token(self, logp_BV: Tensor) -> Tensor:
        """Choose the next token (B,) of each row."""
        if self.temperature == 0:
            return logp_BV.argmax(-1)
        probability_BV = keep_likely(logp_BV / self.temperature, self.top_k, self.top_p).softmax(-1)
        return torch.multinomial(probability_BV, 1, generator=self.generator)[:, 0]


def keep_likely(logits_BV: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Mask tokens outside the `top_k` likeliest, then outside the nucleus of `top_p`, with minus infinity."""
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kept = logits_BV.topk(top_k, -1)  # by index, so ties keep at most k tokens
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probability_BV = sorted_BV.softmax(-1)
        rest_BV = probability_BV.cumsum(-1) - probability_BV >= top_p  # earlier tokens reach top_p already
        rest_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(torch.zeros_like(rest_BV).scatter(-1, order_BV, rest_BV), -torch.inf)
    return logits_BV
