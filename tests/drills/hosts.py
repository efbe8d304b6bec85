"""Drill: memories in models of transformers. A case is `model_type/memory/seed`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .frame import Failure

_families: dict[str, Any] = {}


def cases(count: int, seed: int) -> Iterator[str]:
    """Pairs of a model and a memory; every pair before one of them comes again."""
    from integrations.families import DECODERS, ENCODERS

    from cached_transformers.registry import MEMORIES

    _families.update({family.name: family for family in (*DECODERS, *ENCODERS) if not family.refused})
    pairs = [f"{family}/{memory}" for family in _families for memory in MEMORIES.names()]
    random.Random(seed).shuffle(pairs)
    return (f"{pairs[number % len(pairs)]}/{seed + number}" for number in range(count))


def prepare(shared: Path) -> None:
    """Import what cases use."""

    import cached_lab.experiments.hosts  # noqa: F401

    torch.set_num_threads(1)
    cases(0, 0)


def attempt(case: str, folder: Path) -> None:
    """Add the memory as the table says, and read, train, misspell and remove."""
    from cached_lab.experiments.hosts import answer_to
    from cached_transformers import add_memory, remove_memory
    from cached_transformers.registry import MEMORIES

    name, memory, seed = case.split("/")
    drawn, family, entry = random.Random(case), _families[name], MEMORIES.entry(memory)
    warnings.simplefilter("ignore")
    plain, model = family.build(), family.build()
    try:
        answer, segment = answer_to(model.config.model_type, entry), drawn.randint(3, 7)
    except ValueError as error:
        if "must be language_model" in str(error):
            return  # a part of a model, which has no kind of its own
        raise
    options, carries = dict(answer.options), "state" in getattr(entry.factory, "needs", ())
    if "length" in entry.options and carries:
        # Short: much is forgotten. A scored cache has its sinks beside it.
        options["length"] = drawn.randint(1, 9) + 4 * ("sinks" in entry.options and "observe" in entry.options)
    if memory == "infinity_former":
        options |= {"length": 1, "chunk": 2, "basis": 4, "widths": (0.2,)}  # read from the third segment on
        options |= {"sinks": drawn.randint(0, 2)} if "kl_weight" in options else {}
    torch.manual_seed(int(seed))
    try:
        add_memory(model, {"name": memory, **options}, segment_length=segment if carries or answer.reason else None)
    except ValueError as error:
        if not answer.reason and "sliding window" not in str(error):  # the table's model has none
            raise Failure(f"expected what the table says, {answer}, found: {error}") from error
        return
    if answer.reason:
        raise Failure(f"expected what the table says, {answer}, found that the model takes it")
    ids = torch.randint(3, 64, (drawn.randint(1, 3), drawn.randint(3, 4) * segment + drawn.randint(0, segment - 1)))
    if carries:
        _misspelt(model, ids, drawn)
        _carries(model, ids, segment, name)
        _trains(model, ids, segment)
    remove_memory(model.eval())
    _equal(_read(model, ids), _read(plain, ids), "after remove_memory the model itself")


def _misspelt(model: Any, ids: torch.Tensor, drawn: random.Random) -> None:
    """A keyword that lacks a letter of memory_state is refused."""
    wrong = list("memory_state")
    wrong.pop(drawn.randrange(7, len(wrong)))
    try:
        model(input_ids=ids, **{"".join(wrong): None})
    except (ValueError, TypeError):
        return
    raise Failure(f"expected a refusal of {''.join(wrong)}=, found none")


def _read(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    with torch.no_grad():
        out = model(input_ids=ids, **more)
    return out.last_hidden_state if "last_hidden_state" in out else out.logits


def _equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise Failure(f"expected {what}, found a difference of {(found - expected).abs().max():.2g}")


def _carries(model: Any, ids: torch.Tensor, segment: int, name: str) -> None:
    """A text in two calls with the state is the text in one call."""
    if not hasattr(model, "lm_head") and not hasattr(model, "embed_out"):
        return  # the segments of an encoder all begin with the row's first token
    whole = _read(model, ids)
    with torch.no_grad():
        state = model(input_ids=ids[:, :segment]).memory_state
    _equal(_read(model, ids[:, segment:], memory_state=state), whole[:, segment:], "the text of one call in two")


def _trains(model: Any, ids: torch.Tensor, segment: int) -> None:
    """Rows of several segments train the memory, and a warning tells of rows that do not."""
    model.train()
    own = [p for n, p in model.named_parameters() if ".memory." in f".{n}"]
    for text, steps in ((ids[:, : segment - 1], 3), (ids, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                model.zero_grad()
                out = model(input_ids=text)
                (out.last_hidden_state if "last_hidden_state" in out else out.logits).square().sum().backward()
        told = sum("segment_length" in str(warning.message) for warning in caught)
        trained = any(p.grad is not None and bool(p.grad.any()) for p in own)
        if steps == 1 and own and not trained:
            raise Failure("expected a memory that several segments train, found no gradient")
        if told != (steps > 1 and not trained):
            raise Failure(f"trained={trained} in {steps} steps of {text.shape[1]} tokens, found {told} warnings")


SUMMARY = (
    "a memory in a model of transformers: taken or refused as `cached list memories --host` says; a text in two calls "
    "is the text in one; training reaches the memory or a warning says so; a misspelt state is refused; removal "
    "leaves the model itself"
)
COUNT, SAMPLE = 80, 2
