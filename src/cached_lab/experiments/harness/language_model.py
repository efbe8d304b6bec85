"""`CachedLM`: a language model with a memory as a model of lm-evaluation-harness 0.4.13.

The harness' own models truncate a context to their window. Here a context of any length is processed by segments, as in
training, and the continuation is scored or generated from the state. The border between context and continuation
follows the harness (`TemplateLM`), so that scores are comparable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import simple_parse_args_string
from rich.console import Console
from rich.progress import track

from cached_lab.experiments.load import load_writer
from cached_lab.tasks.language.completion import Writer
from cached_lab.training.distributed import pick_device
from cached_transformers.models.sampling import Choice

from .batches import ScoredText, TextScore, generate_until, log_probabilities

ARGUMENTS = ("run", "checkpoint", "segment_length", "batch_size", "max_gen_toks", "device")
SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": None}


@register_model("cached")
class CachedLM(TemplateLM):  # type: ignore[misc]
    """A language model for the harness.

    Args:
        writer: model, tokenizer and segment length, from `load_writer`.
        batch_size: texts at once.
        max_gen_toks: generated tokens for tasks that set no limit.
        name: distinguishes tokenizers in the harness' request cache, e.g. the run folder.

    Raises:
        ValueError: batch_size or max_gen_toks below 1; a tokenizer without a token for the beginning or end of a text.
    """

    tokenizer = None  # of transformers, for chat templates

    def __init__(self, writer: Writer, *, batch_size: int = 8, max_gen_toks: int = 256, name: str = "cached") -> None:
        super().__init__()
        self.words, self._name = writer.words, name
        self.model, self.segment_length = writer.session.model, writer.session.segment_length
        self.batch_size, self.max_gen_toks = _number("batch_size", batch_size), _number("max_gen_toks", max_gen_toks)
        self._prefix = [*self.words.first] or ([] if self.words.end is None else [self.words.end])
        if not self._prefix:
            raise ValueError(
                "the tokenizer has no token that begins or ends a text, so the first token of a text cannot be scored; "
                "give it a bos_token"
            )
        self._device = next(self.model.parameters()).device

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness' request cache."""
        return self._name

    @property
    def eot_token_id(self) -> int:
        """The token between two texts."""
        return self._prefix[0] if self.words.end is None else self.words.end

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a text, as in training."""
        return self._prefix[0]

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Any:
        """Build the model of `--model_args` (`ARGUMENTS`) with the harness' own additions.

        Raises:
            ValueError: no run, an unknown argument, or a folder that `load_writer` refuses.
        """
        added = {key: value for key, value in (additional_config or {}).items() if value is not None}
        added.pop("max_batch_size", None)
        if not torch.cuda.is_available() and str(added.get("device", "")).startswith("cuda"):
            del added["device"]  # the harness' default, not a request
        given = {**added, **arg_dict}
        if unknown := sorted({*given} - {*ARGUMENTS}):
            raise ValueError(f"unknown model argument {unknown[0]!r} (known: {', '.join(ARGUMENTS)})")
        if "run" not in given:
            raise ValueError("--model_args run=FOLDER is missing: a run folder, or one that save_pretrained wrote")
        run, length = str(given["run"]), given.get("segment_length")
        length = None if length is None else _number("segment_length", length)
        device = pick_device(str(given.get("device", "auto")))
        writer = load_writer(Path(run), str(given.get("checkpoint", "best")), length, device)
        return cls(writer, name=run, **{key: given[key] for key in ("batch_size", "max_gen_toks") if key in given})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Any:
        """Build the model of "run=FOLDER,key=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text, after the tokens that begin every text in training unless add_special_tokens=False."""
        return [*([] if add_special_tokens is False else self.words.first), *self.words.encode(string)]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[TextScore]:
        """Score continuations given their contexts."""
        pairs = [(context or self._prefix, continuation) for _, context, continuation in requests]
        texts = [([*context, *continuation], len(context)) for context, continuation in pairs]
        scores: list[Any] = [None] * len(texts)
        for index, score in self._scores(texts, "loglikelihood", disable_tqdm):
            scores[index] = score
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts: every token given all earlier ones."""
        strings = [request.args[0] for request in requests]
        texts = [([*self._prefix, *self.words.encode(string)], len(self._prefix)) for string in strings]
        scores = [0.0] * len(texts)
        for index, (logp, _) in self._scores(texts, "loglikelihood_rolling", disable_tqdm):
            scores[index] = logp
            self.cache_hook.add_partial("loglikelihood_rolling", (strings[index],), logp)
        return scores

    def _scores(self, texts: Sequence[ScoredText], kind: str, quiet: bool) -> Iterator[tuple[int, TextScore]]:
        found = log_probabilities(self.model, texts, self.segment_length, self.batch_size)
        yield from track(found, kind, len(texts), disable=quiet, console=Console(stderr=True))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to one of the strings `until`, the tokenizer's end, or a number of tokens.

        Contexts with equal numbers of tokens and equal options form a batch.

        Raises:
            ValueError: an unknown option of generation.
        """
        contexts = [self.tok_encode(request.args[0]) or self._prefix for request in requests]

        def group(index: int) -> tuple[int, str]:
            return -len(contexts[index]), repr(sorted(requests[index].args[1].items()))

        batches = []
        for _, found in itertools.groupby(sorted(range(len(requests)), key=group), group):
            members = list(found)
            batches += [members[k : k + self.batch_size] for k in range(0, len(members), self.batch_size)]
        texts = [""] * len(requests)
        for batch in track(batches, "generate_until", disable=disable_tqdm, console=Console(stderr=True)):
            choice, until = choice_of(requests[batch[0]].args[1], self.max_gen_toks)
            rows = [contexts[index] for index in batch]
            written = generate_until(self.model, rows, self.words, self.segment_length, choice, until)
            for index, text in zip(batch, written, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts


def choice_of(options: Mapping[str, Any], new_tokens: int) -> tuple[Choice, list[str]]:
    """Return sampling options and ending strings from a task's `generation_kwargs` (ValueError for unknown ones)."""
    given = dict(normalize_gen_kwargs(dict(options), new_tokens))
    until = [str(string) for string in given.pop("until") if string]
    tokens, sampled = _number("max_gen_toks", given.pop("max_gen_toks")), bool(given.pop("do_sample"))
    chosen = {name: given.pop(name, default) for name, default in SAMPLING.items()}
    if given:
        known = ("until", "max_gen_toks", "do_sample", *SAMPLING)
        raise ValueError(f"unknown generation option {min(given)!r} (known: {', '.join(known)})")
    return Choice(tokens, **(chosen if sampled else {"temperature": 0.0})), until  # type: ignore[arg-type]


def _number(name: str, value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 on")
    return int(value)
