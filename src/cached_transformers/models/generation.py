"""Generate text with a memory: greedy, sampled, or by beam search.

A memory is written once per segment, as in training: the state stays fixed while the partial segment grows, and the
full segment is then read once more as a whole. Meanwhile models of this package (`layers/incremental_decoding.py`) and
hosts with a memory decode with a KV cache, at the cost of one token per token; other models read the partial segment
again for each token.

Works with any model called as `model(tokens_BN, state)` that returns a `ModelOutput` with scores (B, N, V) and has
`init_state(rows)`.

Legend: B rows, N tokens of a prompt, T new tokens, V vocabulary.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.annotations import checked
from cached_transformers.checks import at_least_one
from cached_transformers.state import State, reorder, reset, seal

from .beam_search import search
from .documents import refuse_documents
from .sampling import Choice, ChoiceKeywords
from .segments import as_language_model, begun, cut, read_segments, remembers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Generation(NamedTuple):
    """Generated text.

    Attributes:
        tokens: (B, T) new tokens, without the prompt; after a row's `eos` only `eos` follows.
        state: each row's state after its text, including the prompt and without the last new token:
            `generate(model, tokens[:, -1:], state)` continues with a new segment.
        scores: (B,) log-probability of the row's new tokens under the model, including `eos`.
        lengths: (B,) new tokens of each row, including `eos`.
    """

    tokens: Tensor
    state: State
    scores: Tensor
    lengths: Tensor


@checked
@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_BN: Tensor,
    state: State | None = None,
    *,
    tokens: int,
    segment_length: int | None = None,
    places: Tensor | None = None,
    documents: Tensor | None = None,
    **options: Unpack[ChoiceKeywords],
) -> Generation:
    """Continue each row of a prompt, in evaluation mode and without gradients; the model's mode is restored.

    A training step with activation checkpointing in another thread fails if its backward pass runs in another mode.

    Args:
        model: a language model, or a callable like one.
        prompt_BN: token ids, N >= 1; the first token begins a segment.
        state: state after the text before the prompt; None for the start of a stream. It is not changed.
        tokens: T, maximum of new tokens.
        segment_length: tokens in a segment, as in training; needed by models with a memory. None for one segment.
        places: (B, N, 2) numbers of the sentence and the paragraph of each prompt token, for a model that takes them
            (`LanguageModel`); new tokens continue them.
        documents: refused: a row is one text.
        options: see `Choice`: temperature, top_k, top_p, beams, eos, generator, length_penalty, each.

    Raises:
        ValueError: an argument out of its range or without effect, prompts of different lengths, or no
            `segment_length` for a model with a memory.
    """
    refuse_documents(documents, "generate continues each row after its last token, and a row is one text")
    choice = Choice(tokens, **options)
    if prompt_BN.dim() != 2 or 0 in prompt_BN.shape:
        raise ValueError(f"prompt_BN={tuple(prompt_BN.shape)}: it needs (rows, tokens) with at least one token")
    at_least_one(segment_length=segment_length)
    model = as_language_model(model)
    with evaluating(model):
        rows = prompt_BN.shape[0]
        state = begun(model, state, None, rows)
        if segment_length is None and remembers(state):
            raise ValueError(
                "segment_length=None: a memory is written once per segment; give segment_length as in training"
            )
        return continue_text(GeneratedText(model, prompt_BN, state, segment_length, places=places), choice)


def continue_text(text: GeneratedText, choice: Choice) -> Generation:
    """Continue a text in evaluation mode and without gradients.

    Afterwards the text has read all but each row's last new token; beam search leaves it undefined.

    Raises:
        ValueError: eos is not in the vocabulary.
    """
    text.ask()
    logp_BV = text.read()
    choice.check_vocabulary(logp_BV.shape[-1])
    if choice.beams > 1:
        best = search(text, logp_BV, choice.tokens, choice.beams, choice.eos, choice.length_penalty)
        longest = int(best.length_BL.max())
        return Generation(best.tokens_BLT[:, 0, :longest], best.state, best.score_BL[:, 0], best.length_BL[:, 0])
    return _sample(text, logp_BV, choice)


class ReadsAgain(UserWarning):
    """Generation reads the partial segment again for each token."""


class GeneratedText:
    """A growing text: the state before the partial segment, and the tokens of the partial segment.

    Args:
        model, prompt_BN, places: see `generate`. state: before the prompt.
        segment_length: S; None for one segment.
        again: read the partial segment again for each token even if the model can decode incrementally.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_BN: Tensor,
        state: State,
        segment_length: int | None,
        *,
        again: bool = False,
        places: Tensor | None = None,
    ) -> None:
        self.model, self.segment_length = model, segment_length
        self.options: dict[str, Any] = {"last_only": True} if getattr(model, "scores_last", False) else {}
        *whole, last = cut(prompt_BN.shape[1], segment_length)
        self.open_BN = prompt_BN[:, last]
        if places is not None and places.shape[:2] != prompt_BN.shape:
            raise ValueError(f"places of shape {tuple(places.shape)} must be of the prompt, {(*prompt_BN.shape, 2)}")
        self.places = None if places is None else places[:, last]
        self._state = state
        self._unread = [(prompt_BN[:, part], None if places is None else places[:, part]) for part in whole]
        # Row i has the state of row origin_B[i], so no state moves when beams are chosen.
        self.origin_B = torch.arange(len(prompt_BN), device=prompt_BN.device)
        self.moved, self.continuations = False, 1
        self.steps = not again and _reads_in_steps(model)
        self.opened: Any = None
        self._new = 0  # tokens that `opened` has not read
        self._after: State | None = None

    def _read(self, piece: tuple[Tensor, Tensor | None], state: State, reset_B: Tensor | None = None) -> Any:
        tokens_BN, places = piece
        return self.model(tokens_BN, state, **_placed(places), **self.options)

    @property
    def state(self) -> State:
        """The state after the last full segment, for the rows of that time; reads full prompt segments first."""
        if self._unread:
            for out in read_segments(self._read, self._unread, seal(self._state), in_place=True):
                self._state = out.state
        self._unread = []
        return self._state

    def _before(self) -> State:
        """The state before the partial segment, for the current rows."""
        return reorder(self.state, self.origin_B) if self.moved else self.state

    def ask(self) -> None:
        """Let the partial segment choose among the memory's slots, and read it again with them."""
        if hasattr(self.model, "ask_prompt"):
            before, self._state = self.state, self.model.ask_prompt(self.open_BN, self.state)  # type: ignore[operator]
            if self._state is not before:
                self.opened = self._after = None

    def read(self) -> Tensor:
        """Log-probabilities (B, V) of the next token, float32 or wider."""
        if not self.steps:
            out = self._read((self.open_BN, self.places), self._before())
            self._after = out.state
            scores_BV = out.outputs[:, -1]
        elif self.opened is None:
            room = {} if self.segment_length is None else {"steps": self.segment_length}
            self.opened = self.model.begin(self._before(), self.continuations, **room)  # type: ignore[operator]
            scores_BV = self.model.step(self.open_BN, self.opened, **_placed(self.places))  # type: ignore[operator]
        else:
            scores_BV = self.model.step(self.open_BN[:, -self._new :], self.opened)  # type: ignore[operator]
        if self.steps:
            self._after = getattr(self.opened, "state_after", None)
        self._new = 0
        return scores_BV.to(torch.promote_types(scores_BV.dtype, torch.float32)).log_softmax(-1)

    def after(self) -> State:
        """The state after all tokens: reads the partial segment as a whole, and caches the result until it grows."""
        if self._after is None:
            self._after = self._read((self.open_BN, self.places), self._before()).state
        return self._after

    def append(self, token_B: Tensor) -> None:
        """Append a token to each row; a full segment is written first."""
        if self.open_BN.shape[1] == self.segment_length:
            self._state, self.open_BN, self.opened = self.after(), self.open_BN[:, :0], None
            self.places = None  # the model counts from here on
            self.origin_B, self.moved = torch.arange(len(token_B), device=token_B.device), False
        self.extend(token_B[:, None])
        if self.places is not None:
            self.places = F.pad(self.places, (0, 0, 0, 1), value=-1)

    def extend(self, tokens_BN: Tensor) -> None:
        """Append tokens that the partial segment has room for."""
        self._after, self._new = None, self._new + tokens_BN.shape[1]
        self.open_BN = torch.cat([self.open_BN, tokens_BN], 1)
        if self._new > 1 and not getattr(self.model, "steps_together", False):
            self.opened = None

    def multiply(self, times: int) -> None:
        """Repeat each row `times` times."""
        opened, self.opened = self.opened, None
        self.choose(torch.arange(len(self.open_BN), device=self.open_BN.device).repeat_interleave(times))
        if opened is not None:
            opened.multiply(times)
        self.opened, self.continuations = opened, self.continuations * times

    def choose(self, rows_B: Tensor) -> None:
        """Reorder rows, as in `GrowingText.choose`."""
        if self._after is not None:
            self._after = reorder(self._after, rows_B)
        if self.opened is not None:
            self.opened.choose(rows_B)
        self.origin_B, self.open_BN, self.moved = self.origin_B[rows_B], self.open_BN[rows_B], True
        if self.places is not None:
            self.places = self.places[rows_B]


def _placed(places: Tensor | None) -> dict[str, Tensor]:
    """Keyword argument of a model for places."""
    return {} if places is None else {"places": places}


def _reads_in_steps(model: Any) -> bool:
    """Return whether the model decodes incrementally; warns if one of its parts prevents it."""
    if not hasattr(model, "why_in_one_piece") or not getattr(model, "remembers", True):
        return False
    why = model.why_in_one_piece()
    if why is not None:
        warnings.warn(f"{why}, so each token costs a pass over the partial segment", ReadsAgain, stacklevel=4)
    return why is None


def _sample(text: GeneratedText, logp_BV: Tensor, choice: Choice) -> Generation:
    tokens, eos = choice.tokens, choice.eos
    state: State | None = None
    score_B = torch.zeros_like(logp_BV[:, 0])
    ended_B = torch.zeros_like(score_B, dtype=torch.bool)
    length_B = torch.zeros_like(score_B, dtype=torch.long)
    new: list[Tensor] = []
    while True:
        token_B = choice.token(logp_BV)
        score_B = score_B + torch.where(ended_B, 0, logp_BV.gather(1, token_B[:, None])[:, 0])
        length_B = length_B + ~ended_B
        before_B, done = ended_B, len(new) + 1 == tokens
        if eos is not None:
            token_B = torch.where(ended_B, eos, token_B)
            ended_B = ended_B | (token_B == eos)
            done = done or bool(ended_B.all())
        new.append(token_B)
        if choice.each is not None:
            choice.each(token_B)
        if done or (eos is not None and bool((ended_B & ~before_B).any())):
            # A row that has ended keeps its state.
            state = text.after() if state is None else reset(state, text.after(), ~before_B)
        if done:
            return Generation(torch.stack(new, 1), state, score_B, length_B)
        text.append(token_B)
        logp_BV = text.read()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; the last thread that leaves restores the mode of each module."""
    modules = list(model.modules())
    with _LOCK:
        for module in modules:
            _HELD.setdefault(module, [0, module.training])[0] += 1
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                _HELD[module][0] -= 1
            free = [m for m in _HELD if not any(child in _HELD and _HELD[child][0] for child in m.modules())]
            # Twice, since a parent that entered after its child changes the child once more.
            for module, training in [(module, _HELD.pop(module)[1]) for module in free] * 2:
                if module.training != training:
                    module.train(training)


_LOCK = threading.RLock()
_HELD: dict[nn.Module, list[Any]] = {}
"""Modules in evaluation mode: how many blocks hold each, and its mode before. Parents wait for their children."""
