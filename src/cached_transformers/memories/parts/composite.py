"""Several memories in one place: the layer memories of a layer side by side, perhaps beside one that spans the layers.

Each is asked, read and written as if it were alone. Attention gets their contexts one after the other, in one softmax;
results per head are mixed in one after the other, in the order of the list. Those that are before the layer's
projections ("in_front") act there, in this order, too; queries of the others are made from their result.

Legend: B rows, N tokens, W queries, M slots, L = M + N, H heads, E head width, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.contexts import join
from cached_transformers.interfaces.incremental import open_segment, read_segment
from cached_transformers.interfaces.memory import (
    Context,
    LayerMemory,
    Linear,
    ModelMemory,
    ProjectKV,
    Query,
    Reading,
    Trace,
    Weights,
)
from cached_transformers.positions import Positions, alike
from cached_transformers.registry import UNTOLD
from cached_transformers.state import State, named_tensors


class SideBySide(LayerMemory):
    """Layer memories side by side in one layer, in the order in which they act; its state is the tuple of theirs."""

    def __init__(self, members: Sequence[LayerMemory]) -> None:
        super().__init__()
        self.members: Any = nn.ModuleList(members)
        self.needs = frozenset().union(*(member.needs for member in members))
        self.shared = all(member.shared for member in members)
        observed = [member.observe for member in members if "weights" in member.needs]
        self.observe = None if None in observed else max(observed, default=0)  # type: ignore[type-var]

    def position_scheme(self) -> Positions | None:
        return one_scheme(self.members)

    def window(self) -> int | None:
        windows = [member.window() for member in self.members]
        limits = [window for window in windows if window is not None]
        return min(limits) if limits else None  # Dynamo knows no default of min

    def init_state(self, batch_size: int, like: Tensor) -> State:
        return tuple(member.init_state(batch_size, like) for member in self.members)

    def _states(self, state: State) -> Sequence[State]:
        """The members' states; a layer that is called alone hands over an empty one."""
        return state if len(state) else [()] * len(self.members)

    def open(self, state: State, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> tuple[Any, ...]:
        pairs = zip(self.members, self._states(state), strict=True)
        return tuple(open_segment(member, part, first_B1P, project_kv) for member, part in pairs)

    def read_in_front(self, state: State, query: Query, heads: int) -> tuple[Tensor, list[Reading | None]]:
        """The layer's input (B, N, D) after the members before the projections, and their readings, by member."""
        readings: list[Reading | None] = []
        for member, part in zip(self.members, self._states(state), strict=True):
            reading = read_segment(member, part, query, None) if stands_in_front(member) else None
            if reading is not None:
                x_BHNE = query.x_BND.unflatten(-1, (heads, -1)).transpose(1, 2)
                x_BND = member.combine(x_BHNE, query, reading).transpose(1, 2).flatten(2)
                query = query._replace(x_BND=x_BND)
            readings.append(reading)
        return query.x_BND, readings

    def read(self, opened: tuple[Any, ...], query: Query, project_kv: ProjectKV | None) -> Reading:
        pairs = zip(self.members, opened, strict=True)
        readings = tuple(
            Reading() if stands_in_front(member) else member.read(part, query, project_kv) for member, part in pairs
        )
        context: Context | None = None
        for reading in readings:
            context = join(context, reading.context)
        terms = [reading.query_BND for reading in readings if reading.query_BND is not None]
        return Reading(context, carry=readings, query_BND=torch.stack(terms).sum(0) if terms else None)

    def _readings(self, reading: Reading) -> list[Reading]:
        """Reading of each member, completed by the layer for those that need it."""
        pairs = zip(self.members, reading.carry, strict=True)
        return [part._replace(lse_BHN=reading.lse_BHN) if "lse" in m.needs else part for m, part in pairs]

    def _behind(self, reading: Reading) -> list[tuple[LayerMemory, Reading]]:
        """The members that act after the core, each with its reading."""
        pairs = zip(self.members, self._readings(reading), strict=True)
        return [(member, part) for member, part in pairs if not stands_in_front(member)]

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        for member, part in self._behind(reading):
            y_BHNE = member.combine(y_BHNE, query, part)
        return y_BHNE

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        behind = self._behind(reading) or [(LayerMemory(), Reading())]

        def project_from(index: int, t_BHNE: Tensor) -> Tensor:
            # What follows a member is its output projection, so that it may act before and after that.
            (member, part), last = behind[index], index == len(behind) - 1
            if last:
                return member.project(t_BHNE, query, part, linear, weights)

            def rest(merged_BND: Tensor) -> Tensor:
                return project_from(index + 1, merged_BND.unflatten(-1, (t_BHNE.shape[1], -1)).transpose(1, 2))

            return member.project(t_BHNE, query, part, rest, None)

        return project_from(0, y_BHNE)

    def write(self, state: State, trace: Trace) -> tuple[State, Tensor | None]:
        after, losses = [], []
        readings = self._readings(trace.reading)
        weights = _by_member(trace.weights_BHWL, readings, trace.x_BND.shape[1])
        given = zip(self.members, self._states(state), readings, weights, strict=True)
        for member, part, reading, weights_BHWL in given:
            if weights_BHWL is not None:
                queries = weights_BHWL[:, :, -(member.observe or 0) :]
                weights_BHWL = queries if "weights" in member.needs else None
            new, loss = member.write(part, trace._replace(reading=reading, weights_BHWL=weights_BHWL))
            after.append(new)
            if loss is not None:
                losses.append(loss)
        return tuple(after), torch.stack(losses).sum() if losses else None

    def close_gate(self) -> None:
        for member in self.members:
            member.close_gate()


def _by_member(weights_BHWL: Tensor | None, readings: Sequence[Reading], tokens: int) -> list[Tensor | None]:
    """For each member the weights of the keys of its context, and of the segment, which are the last ones."""
    if weights_BHWL is None:
        return [None] * len(readings)
    parts: list[Tensor | None] = []
    start = 0
    for reading in readings:
        slots = 0 if reading.context is None else reading.context.k_BHME.shape[2]
        ours = weights_BHWL.narrow(-1, start, slots)
        parts.append(torch.cat([ours, weights_BHWL[..., weights_BHWL.shape[-1] - tokens :]], -1))
        start += slots
    return parts


def stands_in_front(memory: LayerMemory) -> bool:
    """True if it acts on the input of the projections."""
    return "in_front" in memory.needs


def members_of(memory: Any) -> list[Any]:
    """The memories of a layer, one by one."""
    return list(memory.members) if isinstance(memory, SideBySide) else [memory]


def recipe_of(parts: Sequence[nn.Module]) -> str:
    """Names, options and sizes of memories and attentions, which tell their states from others."""
    members = (one for part in parts for one in members_of(part) if type(one) is not ModelMemory)
    told = [getattr(one, "recipe", "") or _settings(one) for one in members]
    return "; ".join(f"{len(list(same))} x {recipe}" for recipe, same in groupby(told))


def _settings(part: nn.Module) -> str:
    """The plain attributes of a part that was built without its name."""
    plain = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str) and k not in (*UNTOLD, "training")}
    return f"{type(part).__name__}({', '.join(f'{k}={v!r}' for k, v in sorted(plain.items()))})"


def side_by_side(memories: Sequence[LayerMemory]) -> LayerMemory:
    """One layer memory of several; of one it is that one, and memories that remember nothing are left out."""
    kept = [memory for memory in memories if type(memory) is not LayerMemory or memory.needs]
    if len(kept) < 2:
        return kept[0] if kept else LayerMemory()
    channels = {_channels(memory): type(memory).__name__ for memory in kept}
    channels.pop(None, None)
    if len(channels) > 1:
        (many, first), (few, second) = sorted(channels.items(), reverse=True)[:2]  # type: ignore[type-var]
        raise ValueError(
            f"memories {first} and {second} cannot be in one layer: the positions that they store have {many} "
            f"channels and {few}; leave one of them out"
        )
    front = next((type(memory).__name__ for memory in kept if stands_in_front(memory)), None)
    stored = next((type(memory).__name__ for memory in kept if "stored_kv" in memory.needs), None)
    if front and stored:
        # In training such a memory keeps hidden states, whose keys bypass the memory before the projections.
        raise ValueError(
            f"memory {stored} keeps keys and values, which are made after memory {front}, and hidden states in "
            "training, whose keys are not; take keep='hidden'"
        )
    return SideBySide(kept)


def _channels(memory: LayerMemory) -> int | None:
    """Channels of the positions that a memory stores; None where it stores none."""
    state = memory.init_state(1, torch.zeros(()))
    found = [t.shape[-1] for name, t in named_tensors(state) if name.rpartition(".")[2].startswith("positions_")]
    return found[0] if found else None


def spanning(memories: Sequence[LayerMemory | ModelMemory]) -> ModelMemory | None:
    """The one model-level memory among them; None where there is none."""
    found = [memory for memory in memories if isinstance(memory, ModelMemory)]
    names = [type(memory).__name__ for memory in found]
    if len(found) > 1:
        raise ValueError(
            f"memories {' and '.join(names)} both span the layers, and a model has room for one such; take one of "
            "them, beside memories of a layer"
        )
    if not found:
        return None
    for memory in memories:
        if "context_alone" in found[0].needs and memory is not found[0] and "context" in memory.needs:
            raise ValueError(
                f"memory {names[0]} lets tokens attend it alone, so that memory {type(memory).__name__} has no place "
                "for its context; take one of them"
            )
    return found[0]


def one_scheme(memories: Sequence[LayerMemory | ModelMemory]) -> Positions | None:
    """The position scheme that memories of one layer bring; None where none brings any. Alike ones serve as one."""
    brought = [(type(m).__name__, scheme) for m in memories if (scheme := m.position_scheme()) is not None]
    for name, scheme in brought[1:]:
        if not alike(scheme, brought[0][1]):
            raise ValueError(
                f"memories {brought[0][0]} and {name} bring different position schemes to one layer "
                f"({type(brought[0][1]).__name__}, {type(scheme).__name__}); give relative=False to one of them, or "
                "the same settings to both"
            )
    return brought[0][1] if brought else None
