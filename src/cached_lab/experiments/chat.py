"""A chat of any length with a model that has a memory: only new tokens are read, and the memory holds the rest.

Legend: B rows, M slots, N tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cached_lab.tasks.language.completion import CONTEXT, Spelling, words_of_transformers
from cached_lab.yaml_tree import apply_override
from cached_transformers import Session
from cached_transformers.integrations.hub import records_memory
from cached_transformers.models.sampling import Choice
from cached_transformers.state import State, nbytes

from .pretrained import remember, resolve_model

MEMORY = "streaming_llm"
"""Default memory of a model without one: it has no weights."""
WINDOW, SEGMENT, SINKS = 512, 256, 4
"""Slots, tokens of a segment, and slots among them for the first tokens, where the model's context has room."""
ANSWER = "[[answer]]"
"""An answer in a rendered chat, whose following text is wanted."""


def load_chat_model(name: str, memory: str | None, device: torch.device) -> tuple[Any, Any]:
    """Load a decoder and its tokenizer, and add a memory to a model without one.

    Args:
        name: see `resolve_model`.
        memory: "NAME" or "NAME,option=value,..."; None for the model's own, or `MEMORY`.

    Raises:
        ValueError: no such model; the model has a memory already, or the memory has weights that are not trained.
    """
    model, tokenizer = resolve_model(name)
    if memory is not None or not records_memory(model.config):
        kind, *overrides = (memory or MEMORY).split(",")
        options: dict[str, Any] = {"name": kind}
        for override in overrides:
            apply_override(options, override)
        context = getattr(model.config, "max_position_embeddings", None) or 4 * SEGMENT
        length = options.pop("segment_length", min(SEGMENT, context // 4))
        if options == {"name": MEMORY}:
            options |= {"length": min(WINDOW, context // 2) - SINKS, "sinks": SINKS}
        remember(model, name, options, length)
    return model.to(device).eval(), tokenizer


class TemplateTurns:
    """Turns as the tokenizer's chat template writes them.

    Args:
        tokenizer: of transformers. system: the system message; None for the template's own, or none.

    Raises:
        ValueError: the tokenizer has no template, or the template refuses the messages.
    """

    special = False
    """The tokenizer puts no tokens before the first text: the template writes them."""

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"{tokenizer.name_or_path} has no chat template; give --plain for turns of User and Assistant, or a "
                "model that was tuned for chats"
            )
        self.tokenizer, self.system = tokenizer, system
        self.following("text", "")

    def first(self, text: str) -> str:
        """The first turn, up to the place of the answer."""
        return self._rendered([("user", text)])

    def following(self, text: str, last: str) -> str:
        """A later turn, from the end of the answer on; `last` is the text of the answer's last token."""
        turns = [("user", "text"), ("assistant", ANSWER), ("user", text)]
        _, found, after = self._rendered(turns).partition(ANSWER)
        if not found:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out earlier answers, which the memory "
                "holds; give --plain"
            )
        return after

    def ended(self, answer: str) -> bool:
        """Return False: only a token ends an answer."""
        return False

    def _rendered(self, turns: list[tuple[str, str]]) -> str:
        if self.system is not None:
            turns = [("system", self.system), *turns]
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except ImportError:  # jinja2
            raise
        except Exception as error:
            given = f"--system {self.system!r}: " if self.system is not None else ""
            way = "leave out --system, or give --plain" if given else "give --plain"
            raise ValueError(f"{given}the chat template refuses the messages ({error}); {way}") from error


class PlainTurns:
    """Turns of User and Assistant for a model without a chat template; an answer is one line."""

    special = True
    """The tokenizer puts its tokens before the first text."""

    def __init__(self, system: str | None) -> None:
        self.system = system

    def first(self, text: str) -> str:
        """The first turn; see `TemplateTurns.first`."""
        return f"{self.system}\n\n" * (self.system is not None) + f"User: {text}\nAssistant:"

    def following(self, text: str, last: str) -> str:
        """A later turn; see `TemplateTurns.following`."""
        return "\n" * ("\n" not in last) + f"User: {text}\nAssistant:"

    def ended(self, answer: str) -> bool:
        """Return True at the end of a line."""
        return "\n" in answer.lstrip()


Turns = TemplateTurns | PlainTurns


class Conversation:
    """Turns of a user and answers of a model.

    Args:
        model: a decoder of transformers with a memory that has a state. tokenizer: of transformers.
        turns: texts around the turns.
        tokens: most of an answer. temperature: of the sampling.
        seed: with the position in the text, of the sampling: the same position gives the same answer.

    Attributes:
        session: the text so far.

    Raises:
        ValueError: an option out of its range, or a memory without a state.
    """

    def __init__(self, model: Any, tokenizer: Any, turns: Turns, *, tokens: int, temperature: float, seed: int) -> None:
        Choice(tokens, temperature=temperature)
        self.model, self.turns, self.seed = model, turns, seed
        self.options: dict[str, Any] = {"tokens": tokens, "temperature": temperature}
        self.words = words_of_transformers(tokenizer)
        ends = getattr(model.generation_config, "eos_token_id", None)
        closing = {*self.words.encode(turns.following("text", ""))[:1]} & {*tokenizer.all_special_ids}
        self.ends = {self.words.end, *(ends if isinstance(ends, list) else [ends]), *closing} - {None}
        self.session = Session(model)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue the chat of a file of `session.save` (ValueError: it is of another model or memory)."""
        self.session = Session.load(self.model, path)

    def hear(self, text: str) -> None:
        """Read a turn of the user."""
        if self.session.tokens == 0:
            return self.read(self.ids(self.turns.first(text), first=True))
        last = int(self.session.partial_1N[0, -1])
        ids = self.ids(self.turns.following(text, self.words.decode([last])))
        self.read(ids[1:] if last in self.ends and ids[0] in self.ends else ids)

    def ids(self, text: str, first: bool = False) -> list[int]:
        """Token ids of a text (ValueError: half of a character)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not UTF-8 at character {error.start}; set the terminal to UTF-8") from None
        return [*(self.words.first if first and self.turns.special else ()), *self.words.encode(text)]

    def read(self, ids: Sequence[int]) -> None:
        """Read tokens."""
        self.session.read(torch.tensor([ids], dtype=torch.long))

    def answer(self, stop: Sequence[Any] = ()) -> Iterator[str]:
        """Sample an answer and yield its text piece by piece; each token is part of the chat.

        Args:
            stop: the answer ends as soon as this list holds something.
        """
        session = self.session
        spelling, answer = Spelling(self.words.decode, session.partial_1N[0, -CONTEXT:].tolist()), ""
        seed = random.Random(f"{self.seed} {session.tokens}").getrandbits(63)
        generator = torch.Generator(self.model.device).manual_seed(seed)
        for token in session.stream(**self.options, generator=generator):
            piece = spelling.more([token])
            answer += piece
            yield piece
            if token in self.ends or self.turns.ended(answer) or stop:
                break
        yield spelling.rest()

    def summary(self) -> str:
        """The memory, its slots, the tokens read, and bytes of the state."""
        record = self.model.config.cached_transformers
        options = {**record["memory"], "segment_length": record.get("segment_length")}
        name, state, partial = options.pop("name"), self.session.state, self.session.partial_1N.shape[1]
        filled, slots = filled_slots(state)
        told = f", {filled:,} of {slots:,} slots of all layers filled" if slots else ""
        return (
            f"memory {name} ({', '.join(f'{key}={value}' for key, value in options.items())}){told}\n"
            f"{self.session.tokens:,} tokens read, the last {partial:,} in the partial segment, "
            f"{nbytes(state):,} bytes of state"
        )


def filled_slots(state: State) -> tuple[int, int]:
    """Number of filled slots, and of all slots, over the layers of a state; memories without slots count none."""
    valid_BM = getattr(state, "valid_BM", None)
    if valid_BM is not None:
        return int(valid_BM.sum()), valid_BM.numel()
    if isinstance(state, torch.Tensor):
        return 0, 0
    found = [filled_slots(part) for part in state]
    return sum(filled for filled, _ in found), sum(slots for _, slots in found)
