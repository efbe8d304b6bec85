"""Texts around the turns of a chat: by the chat template of the tokenizer, or plain."""

from __future__ import annotations

from typing import Any

ANSWER = "[[answer]]"
"""An answer in a rendered chat, whose following text is wanted."""


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
