"""`CachedLM`: what lm-evaluation-harness asks of a model, answered by a language model with a memory.

The harness' own models cut a context to what they can see. Here nothing is cut off: a context of any length is read
segment by segment, as in training, and what follows is scored, or written, given the state. Its rules for where a
context ends and a continuation begins are the harness' own (`TemplateLM`), so that scores compare with those of others.

Written against version 0.4.13 of lm_eval (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from cached_lab.experiments.load import load_writer
from cached_lab.tasks.language.completion import Words, Writer
from cached_lab.training.distributed import pick_device
from cached_transformers.extras import require
from cached_transformers.models.sampling import Choice

from .scoring import Scored, log_probabilities
from .writing import write_until

NAME = "cached"
"""Under which the harness knows the model."""
ROWS, NEW_TOKENS = 8, 256
"""Texts that are read at once, and tokens that are written at most, if nothing else is said; the latter as in lm_eval's
own models."""


class _Cached:
    """What `CachedLM` does, without the class of the harness that it is made of.

    Args:
        writer: model, words and segments, as `load_writer` reads them of a folder.
        batch_size: texts at once. max_gen_toks: tokens that are written at most, where a task does not say.
        name: by which the harness tells tokenizers apart, the folder for example.

    Raises:
        ValueError: batch_size or max_gen_toks below 1; no token that may stand before a text.
    """

    tokenizer = None  # of transformers, for chat templates
    cache_hook: Any

    def __init__(
        self, writer: Writer, *, batch_size: int = ROWS, max_gen_toks: int = NEW_TOKENS, name: str = NAME
    ) -> None:
        super().__init__()
        self.words: Words = writer.words
        self.model, self.segment_length = writer.session.model, writer.session.segment_length
        self.batch_size, self.max_gen_toks = _number("batch_size", batch_size), _number("max_gen_toks", max_gen_toks)
        self._name = name
        self._before = [*self.words.first] or ([] if self.words.end is None else [self.words.end])
        if not self._before:
            raise ValueError(
                "the tokenizer has no token that stands before a text, nor one that ends it, so that nothing can be "
                "said of a text's first token; give it a bos_token"
            )
        self._device = next(self.model.parameters()).device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Any:
        """The model of `--model_args` and of what the harness adds to them.

        Args:
            arg_dict: "run", a folder of a run or of `save_pretrained`; and "checkpoint", "segment_length",
                "batch_size", "max_gen_toks", "device".

        Raises:
            ValueError: no folder, an argument that there is not, or what `load_writer` refuses.
        """
        added = {key: value for key, value in (additional_config or {}).items() if value is not None}
        added.pop("max_batch_size", None)  # of a search for the largest batch, which there is not
        if not torch.cuda.is_available() and str(added.get("device", "")).startswith("cuda"):
            del added["device"]  # the harness says "cuda:0" where nobody has said anything
        given = {**added, **arg_dict}
        known = ("run", "checkpoint", "segment_length", "batch_size", "max_gen_toks", "device")
        if unknown := sorted({*given} - {*known}):
            raise ValueError(f"unknown model argument {unknown[0]!r} (known: {', '.join(known)})")
        if "run" not in given:
            raise ValueError("--model_args run=FOLDER is missing: a run folder, or one that save_pretrained wrote")
        length = given.get("segment_length")
        length = None if length is None else _number("segment_length", length)
        device = pick_device(str(given.get("device", "auto")))
        writer = load_writer(Path(str(given["run"])), str(given.get("checkpoint", "best")), length, device)
        options = {key: given[key] for key in ("batch_size", "max_gen_toks") if key in given}
        return cls(writer, name=str(given["run"]), **options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Any:
        """As `create_from_arg_obj`, of "run=FOLDER,key=value"."""
        parsed = require("lm_eval.utils", extra="eval").simple_parse_args_string(arg_string)
        return cls.create_from_arg_obj(parsed, additional_config)

    @property
    def tokenizer_name(self) -> str:
        """What tells this model's tokens from those of others, where the harness keeps requests."""
        return self._name

    @property
    def eot_token_id(self) -> int:
        """What stands between two texts."""
        return self._before[0] if self.words.end is None else self.words.end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text, as in training."""
        return self._before[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, behind those that stand before every text in training (none with add_special_tokens=False)."""
        return [*([] if add_special_tokens is False else self.words.first), *self.words.encode(string)]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Scores of continuations, each behind its context; what contexts have in common is read once."""
        behind = [(context or self._before, continuation) for _, context, continuation in requests]
        texts = [Scored([*context, *continuation], len(context)) for context, continuation in behind]
        keys = [request[0] for request in requests]
        return self._scored("loglikelihood", texts, keys, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts: every token given all that stand before it, however many these are."""
        strings = [request.args[0] for request in requests]
        texts = [Scored([*self._before, *self.words.encode(string)], len(self._before)) for string in strings]
        scores = self._scored("loglikelihood_rolling", texts, [None] * len(texts), disable_tqdm)
        for string, score in zip(strings, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), score.logp)
        return [score.logp for score in scores]

    def _scored(
        self, kind: str, texts: Sequence[Scored], keys: Sequence[tuple[str, str] | None], quiet: bool
    ) -> list[Any]:
        scores: list[Any] = [None] * len(texts)
        found = log_probabilities(self.model, texts, self.segment_length, self.batch_size)
        for place, score in _progress(found, len(texts), kind, quiet):
            scores[place] = score
            if (key := keys[place]) is not None:
                self.cache_hook.add_partial(kind, key, tuple(score))
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to one of the strings `until`, the tokenizer's end, or so many tokens.

        Contexts of the same number of tokens and the same options are gone on with together.

        Raises:
            ValueError: an option of generation that there is not.
        """
        contexts = [self.tok_encode(request.args[0]) or self._before for request in requests]

        def group(place: int) -> tuple[int, str]:
            return -len(contexts[place]), repr(sorted(requests[place].args[1].items()))

        texts: list[str] = [""] * len(requests)
        batches = [
            members[begin : begin + self.batch_size]
            for _, found in itertools.groupby(sorted(range(len(requests)), key=group), group)
            for members in [list(found)]
            for begin in range(0, len(members), self.batch_size)
        ]
        for batch in _progress(batches, len(batches), "generate_until", disable_tqdm):
            choice, until = choice_of(requests[batch[0]].args[1], self.max_gen_toks)
            rows = [contexts[place] for place in batch]
            written = write_until(self.model, rows, self.words, self.segment_length, choice, until)
            for place, text in zip(batch, written, strict=True):
                texts[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return texts


def choice_of(options: Mapping[str, Any], new_tokens: int) -> tuple[Choice, list[str]]:
    """How tokens are chosen, and the strings that end a text, by a task's `generation_kwargs`.

    Raises:
        ValueError: one that there is not, or what `Choice` refuses.
    """
    given = dict(require("lm_eval.models.utils", extra="eval").normalize_gen_kwargs(dict(options), new_tokens))
    until = [str(string) for string in given.pop("until") if string]
    tokens, sampled = _number("max_gen_toks", given.pop("max_gen_toks")), bool(given.pop("do_sample"))
    names = {"temperature": 1.0, "top_k": None, "top_p": None}
    chosen = {name: given.pop(name, default) for name, default in names.items()}
    if given:
        raise ValueError(
            f"generation option {min(given)!r} is none of until, max_gen_toks, do_sample, {', '.join(names)}"
        )
    return Choice(tokens, **(chosen if sampled else {"temperature": 0.0})), until


def _number(name: str, value: Any) -> int:
    """A whole number from 1 on (ValueError)."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 on")
    return number


def _progress(items: Any, count: int, what: str, quiet: bool) -> Any:
    return track(items, what, count, disable=quiet, console=Console(stderr=True))


@functools.cache
def cached_lm() -> Any:
    """The class `CachedLM`, a model of the harness, which knows it as "cached" from now on.

    Raises:
        ImportError: lm_eval is not installed.
    """
    template = require("lm_eval.api.model", extra="eval").TemplateLM

    class CachedLM(_Cached, template):  # type: ignore[misc, valid-type]
        __doc__ = _Cached.__doc__

    return require("lm_eval.api.registry", extra="eval").register_model(NAME)(CachedLM)
