"""Text from a language model with a memory: greedy, sampled (top-k, nucleus arXiv:1904.09751), or by beam search.

A memory is written once a segment. So that the model meets the segments it was trained on, the state stays as it is
while a segment grows: each step reads the segment again from its first token, and the state moves on when the segment
is full. A token costs a forward pass over at most `segment_length` tokens. (Where a memory makes the cut of a text
irrelevant, one token at a time would give the same; there is one rule for all of them.)

Works with any model called as `model(tokens_BN, state)` that gives a `ModelOutput` with scores (B, N, V) and has
`init_state(rows)`.

Legend: B rows, N tokens of a prompt, T new tokens, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one, comparing_lengths
from cached_transformers.state import State, reorder, repeat, reset, seal

from .beam_search import search
from .segments import as_language_model, cut, read_segments, remembers


class Generation(NamedTuple):
    """What was generated.

    Attributes:
        tokens: (B, T) new tokens, without the prompt; behind a row's `eos` there is nothing but `eos`.
        state: each row's state after its text, prompt included, up to but without the row's last new token, fed by
            segments: `generate(model, tokens[:, -1:], state)` goes on, with a new segment.
        scores: (B,) log-probability that the model gives to the row's new tokens, `eos` included, whatever they were
            sampled from.
        lengths: (B,) new tokens of each row, `eos` included.
    """

    tokens: Tensor
    state: State
    scores: Tensor
    lengths: Tensor


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_BN: Tensor,
    state: State | None = None,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    eos: int | None = None,
    generator: torch.Generator | None = None,
    segment_length: int | None = None,
    length_penalty: float = 1.0,
    each: Callable[[Tensor], object] | None = None,
) -> Generation:
    """Continue each row of a prompt. Runs in evaluation mode and without gradients; the model's mode is restored.

    Args:
        model: a language model, or anything called like one.
        prompt_BN: token ids, N >= 1; the first of them begins a segment.
        state: state after the text before the prompt; None for the start of a stream. It is not changed.
        tokens: T, the most new tokens.
        temperature: divides the scores before sampling; 0 takes the likeliest token.
        top_k: sample among so many likeliest tokens. top_p: among the fewest that have this probability together,
            counted after `top_k`.
        beams: K; above 1, beam search, which draws nothing. It ends for a row when K continuations of it have met
            `eos` among the K best, and takes the one with the highest log-probability / length ** `length_penalty`.
        eos: token after which a row stops; None for none. All end when every row has.
        generator: for sampling, on the model's device; the same seed gives the same tokens.
        segment_length: tokens in a segment, as in training; needed by models with a memory. None reads all as one.
        length_penalty: only for beams; 0 compares sums, which favour short texts.
        each: called with the (B,) tokens of every step as soon as they are chosen, to show a text while it grows. Beams
            are chosen at the end, and have no such steps.

    Raises:
        ValueError: an argument out of its range or without effect, prompts of different lengths, or no
            `segment_length` for a model with a memory.
    """
    _check_prompt(prompt_BN)
    if segment_length is not None:
        at_least_one(segment_length=segment_length)
    model = as_language_model(model)
    with evaluating(model):
        rows = prompt_BN.shape[0]
        state = model.init_state(rows) if state is None else state  # type: ignore[operator]
        if segment_length is None and remembers(state):
            raise ValueError(
                "this model has a memory, which is written once a segment; give segment_length, the length of the "
                "segments it was trained on"
            )
        text = Text(model, prompt_BN, state, segment_length)
        return go_on(
            text,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            beams=beams,
            eos=eos,
            generator=generator,
            length_penalty=length_penalty,
            each=each,
        )


def go_on(
    text: Text,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    eos: int | None = None,
    generator: torch.Generator | None = None,
    length_penalty: float = 1.0,
    each: Callable[[Tensor], object] | None = None,
) -> Generation:
    """Continue a text, which has then read all but each row's last new token, save with beams, which leave it.

    Args: as of `generate`. The model is in evaluation mode, and no gradient is recorded.
    """
    _check_options(tokens, temperature, top_k, top_p, beams, eos, length_penalty)
    if each is not None and beams > 1:
        raise ValueError(f"beams={beams} chooses its tokens at the end; leave out each=..., or take beams=1")
    logp_BV = text.read()
    if eos is not None and eos >= logp_BV.shape[-1]:
        raise ValueError(f"eos={eos} is not in the vocabulary of {logp_BV.shape[-1]} tokens; None is for no end")
    if beams > 1:
        best = search(text, logp_BV, tokens, beams, eos, length_penalty)
        longest = int(best.length_BL.max())
        return Generation(best.tokens_BLT[:, 0, :longest], best.state, best.score_BL[:, 0], best.length_BL[:, 0])
    return _sample(text, logp_BV, tokens, temperature, top_k, top_p, eos, generator, each)


class ReadsAgain(UserWarning):
    """A text is generated by reading its open segment again for each token."""


class Text:
    """A text that grows: a state that stays as it is within a segment, and the tokens read since.

    Args:
        model: see `generate`. prompt_BN: likewise. state: before it.
        segment_length: S; None for one segment of all.
        again: read the open segment again for each token, whatever the model can.
    """

    def __init__(
        self, model: nn.Module, prompt_BN: Tensor, state: State, segment_length: int | None, *, again: bool = False
    ) -> None:
        self.model, self.segment_length = model, segment_length
        self.options: dict[str, Any] = {"last_only": True} if getattr(model, "scores_last", False) else {}
        *whole, last = cut(prompt_BN.shape[1], segment_length)
        self.open_BN = prompt_BN[:, last]
        self._state, self._unread = state, [prompt_BN[:, segment] for segment in whole]
        # A row's state is that of the row `origin_B`, so that no state moves when continuations are chosen.
        self.origin_B = torch.arange(len(prompt_BN), device=prompt_BN.device)
        self.moved, self.continuations = False, 1
        self.steps = not again and _reads_in_steps(model)
        self.opened: Any = None
        self._after: State | None = None

    def _read(self, tokens_BN: Tensor, state: State, reset_B: Tensor | None = None) -> Any:
        return self.model(tokens_BN, state, **self.options)

    @property
    def state(self) -> State:
        """Behind the last full segment, of the rows as they were then; whole segments of the prompt are read now."""
        if self._unread:
            for out in read_segments(self._read, self._unread, seal(self._state), in_place=True):
                self._state = out.state
        self._unread = []
        return self._state

    def _before(self) -> State:
        """The state before the open segment, of the rows as they are now."""
        return reorder(self.state, self.origin_B) if self.moved else self.state

    def read(self) -> Tensor:
        """Log-probabilities (B, V) of the next token, float32 or wider."""
        if not self.steps:
            out = self._read(self.open_BN, self._before())
            self._after = out.state
            scores_BV = out.outputs[:, -1]
        elif self.opened is None:
            room = {} if self.segment_length is None else {"steps": self.segment_length}
            self.opened = self.model.begin(self._before(), self.continuations, **room)  # type: ignore[operator]
            scores_BV = self.model.step(self.open_BN, self.opened)  # type: ignore[operator]
        else:
            scores_BV = self.model.step(self.open_BN[:, -1:], self.opened)  # type: ignore[operator]
        return scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32)).log_softmax(-1)

    def after(self) -> State:
        """The state after all tokens; made by reading the open segment as a whole, and kept until it grows."""
        if self._after is None:
            self._after = self._read(self.open_BN, self._before()).state
        return self._after

    def append(self, token_B: Tensor) -> None:
        """Go on with a token for each row; a segment that is full is written, and the state moves on."""
        if self.open_BN.shape[1] == self.segment_length:
            self._state, self.open_BN, self.opened = self.after(), self.open_BN[:, :0], None
            self.origin_B, self.moved = torch.arange(len(token_B), device=token_B.device), False
        self._after = None
        self.open_BN = torch.cat([self.open_BN, token_B[:, None]], 1)

    def multiply(self, times: int) -> None:
        """Each row `times` times, one behind the other."""
        if self._after is not None:
            self._after = repeat(self._after, times)
        if self.opened is not None:
            self.opened.multiply(times)
        self.origin_B, self.open_BN = (t.repeat_interleave(times, 0) for t in (self.origin_B, self.open_BN))
        self.moved, self.continuations = True, self.continuations * times

    def choose(self, rows_B: Tensor) -> None:
        """Rows in this order; they may repeat or vanish, as a `GrowingText`'s may."""
        if self._after is not None:
            self._after = reorder(self._after, rows_B)
        if self.opened is not None:
            self.opened.choose(rows_B)
        self.origin_B, self.open_BN, self.moved = self.origin_B[rows_B], self.open_BN[rows_B], True


def _reads_in_steps(model: Any) -> bool:
    """Whether a token costs one token; where the model has to read its open segment again, a warning says why."""
    ask = getattr(model, "why_in_one_piece", None)
    why = None if ask is None else ask()
    if why is not None:
        warnings.warn(f"{why}, so that each token costs a pass over the open segment", ReadsAgain, stacklevel=4)
    return ask is not None and why is None


def _sample(
    text: Text,
    logp_BV: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos: int | None,
    generator: torch.Generator | None,
    each: Callable[[Tensor], object] | None,
) -> Generation:
    state: State | None = None
    score_B = torch.zeros_like(logp_BV[:, 0])
    ended_B = torch.zeros_like(score_B, dtype=torch.bool)
    length_B = torch.zeros_like(score_B, dtype=torch.long)
    new: list[Tensor] = []
    while True:
        if temperature == 0:
            token_B = logp_BV.argmax(-1)
        else:
            probability_BV = keep_likely(logp_BV / temperature, top_k, top_p).softmax(-1)
            token_B = torch.multinomial(probability_BV, 1, generator=generator)[:, 0]
        score_B = score_B + torch.where(ended_B, 0, logp_BV.gather(1, token_B[:, None])[:, 0])
        length_B = length_B + ~ended_B
        before_B, done = ended_B, len(new) + 1 == tokens
        if eos is not None:
            token_B = torch.where(ended_B, eos, token_B)
            ended_B = ended_B | (token_B == eos)
            done = done or bool(ended_B.all())
        new.append(token_B)
        if each is not None:
            each(token_B)
        if done or (eos is not None and bool((ended_B & ~before_B).any())):
            # A row that has ended keeps the state that it ended with: what is read for it since is of no account.
            state = text.after() if state is None else reset(state, text.after(), ~before_B)
        if done:
            return Generation(torch.stack(new, 1), state, score_B, length_B)
        text.append(token_B)
        logp_BV = text.read()


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first
            if module.training != training:
                module.train(training)


def _check_prompt(prompt_BN: Tensor) -> None:
    if not isinstance(prompt_BN, Tensor):
        raise ValueError(
            f"the prompt is a {type(prompt_BN).__name__}, not a tensor (rows, tokens). Prompts of different lengths "
            "are continued one length at a time: padding would shift where a row's segments begin, and rows do not "
            "depend on each other"
        )
    if prompt_BN.dim() != 2 or 0 in prompt_BN.shape:
        raise ValueError(
            f"the prompt of shape {tuple(prompt_BN.shape)} must be (rows, tokens) with at least one token; a text from "
            "nothing begins with a token that stands for its start"
        )


def _check_options(
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    beams: int,
    eos: int | None,
    length_penalty: float,
) -> None:
    at_least_one(tokens=tokens, beams=beams, top_k=top_k)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and not negative; 0 takes the likeliest token")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]; it is the probability that is kept")
    limits = {name: value for name, value in {"top_k": top_k, "top_p": top_p}.items() if value is not None}
    if limits and temperature == 0:
        raise ValueError(f"{limits} limits what is drawn, but temperature=0 draws nothing; leave one of them out")
    if beams > 1 and (limits or temperature not in (0.0, 1.0)):
        raise ValueError(
            f"beams={beams} searches and draws nothing: leave out temperature={temperature}"
            + "".join(f" and {name}={value}" for name, value in limits.items())
            + ", or take beams=1"
        )
    comparing_lengths(length_penalty=length_penalty)
    if beams == 1 and length_penalty != 1.0:
        raise ValueError(f"length_penalty={length_penalty} compares beams: take beams=2 or more")
    if eos is not None and eos < 0:
        raise ValueError(f"eos={eos} must be a token id, or None for no end")
