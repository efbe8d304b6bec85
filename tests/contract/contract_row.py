"""Contract of one memory, a row of `CONTRACTS`; and reasons for exemptions that several rows have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from contract.costs import Cost, ImageCost


@dataclass(frozen=True)
class Contract:
    """Contract of one memory.

    Attributes:
        options: small sizes; what is not named here keeps its default.
        beside: other memories in the same model.
        bytes_per_row: size of the state of one layer (of the model, for a model memory), for float32 and width D.
        exact: options with which a stream cut into segments equals the whole; needed where `exact_when` is registered.
        models: the models that take these options; None for all that suit the memory.
        model: options of the model, with and without the memory, where the model offers them.
        detached: no gradient flows through the state, whatever `bptt` says.
        exempt: name of a rule, or rule:model, -> why it does not apply.
        cost: what a token of a language model costs. image_cost: what an image costs. Each memory has one of them.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[dict[str, Any], ...] = ()
    bytes_per_row: Callable[[int], int] | None = None
    exact: Mapping[str, Any] | None = None
    models: tuple[str, ...] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    detached: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None
    image_cost: ImageCost | None = None

    def spec(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Return the value of the model's option `memory`, with `options` instead of the row's if given."""
        memory = {"name": name, **self.options, **(options or {})}
        return [memory, *self.beside] if self.beside else memory


relative = partial(Contract, model={"positions": "relative"})
stateless = partial(Contract, bytes_per_row=lambda d: 0)
detached = partial(Contract, detached=True)
detached_relative = partial(relative, detached=True)

UNREAD = "only the class token is read, and the last layer's convolution reaches the patches alone"
SHARED = "one cache for all rows: the state of a row is empty, and the cache is a buffer, tested as such"
DROPPED = "what the last layer makes of the memory's tokens is dropped, so its output projection and feed-forward rest"
NOTHING = "nothing crosses from one segment to the next"
LEARNED = "the first segment reads learned vectors, which are part of the definition"
READS_ITS_OWN = "a token reads what it and those before it wrote, in the first segment, too"
FEEDBACK = {"empty": "a token attends the memory alone, not itself: without a memory there is no attention at all"}
