"""State tuning: train only the initial state of a frozen model, a few kilobytes.

    S_0 = argmin over S_0 of the loss of texts that are read from S_0 on

It is prompt tuning (Lester et al. 2021, arXiv:2104.08691) with a memory instead of prompt vectors.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.layers.initial_state import PLACE, InitialState, initial_state_of
from cached_transformers.layers.stack import Stack
from cached_transformers.state import State, check, load, map_state, named_tensors, save

from .generation import evaluating
from .segments import as_language_model, cut, host_reader, read_segments


def tune_initial_state(model: nn.Module, text_1N: Tensor, *, segment_length: int | None = None) -> InitialState:
    """Freeze a language model and make the initial state of its rows trainable.

    All loops use it from now on, also for rows that are reset: `SegmentLoop`, `generate`, `read_stream`, and a host's
    `Trainer`. Train the parameters of the returned module, then call `save_initial_state`.

    Args:
        model: of this package, or a decoder of transformers with a memory that has a state.
        text_1N: token ids of one row; training starts from the state after it, since an empty memory is never read and
            gets no gradient.
        segment_length: tokens in a segment of that text; None for one segment.

    Raises:
        ValueError: no memory with a state that is read; or the model has an initial state already.
    """
    place = _place(model)
    state = _state_after(model, text_1N, segment_length)
    return _put(model, place, state)


def begin_with(model: nn.Module, state: State) -> InitialState:
    """Make the state of one row the initial state, with all its floating-point tensors as parameters; freezes nothing.

    Raises:
        ValueError: the model has an initial state already, or carries no state; a state of another model.
    """
    check(state, _empty(model), 1)
    initial = InitialState(state, {name for name, t in named_tensors(state) if t.is_floating_point()})
    _place(model).add_module(PLACE, initial)
    return initial


def save_initial_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the tuned state, with the fingerprint of the weights that it was tuned for.

    Raises:
        ValueError: the model has none. NotWritten: e.g. the disk is full.
    """
    save(_tuned(model)(1), path, model=model)


def load_initial_state(model: nn.Module, path: str | os.PathLike[str]) -> InitialState:
    """Load a tuned state into its model and freeze the model as `tune_initial_state` does.

    Raises:
        ValueError: no such file, or one of other weights; the model has an initial state already.
    """
    place = _place(model)
    return _put(model, place, load(path, _empty(model), model=model))


def remove_initial_state(model: nn.Module) -> None:
    """Let rows begin with an empty state again. The weights stay frozen; call `requires_grad_()` to train them.

    Raises:
        ValueError: there is nothing to remove.
    """
    _tuned(model)
    delattr(_holder(model), PLACE)


def _holder(model: Any) -> nn.Module:
    """The module that makes states: a stack, or the decoder of a host (ValueError: none)."""
    if isinstance(getattr(model, "stack", None), Stack):
        return model.stack  # type: ignore[no-any-return]
    reader = host_reader(model)
    if reader is None:
        raise ValueError(
            f"{type(model).__name__} carries no state from segment to segment; add_memory gives a host one"
        )
    return reader.body  # type: ignore[no-any-return]


def _place(model: nn.Module) -> nn.Module:
    """The module that makes states (ValueError: it has an initial state already)."""
    place = _holder(model)
    if initial_state_of(place) is not None:
        raise ValueError(f"{type(model).__name__} has an initial state already; call remove_initial_state(model) first")
    return place


def _tuned(model: nn.Module) -> InitialState:
    found = initial_state_of(_holder(model))
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no initial state of its own; call tune_initial_state(model) first"
        )
    return found


def _empty(model: Any) -> State:
    begin = getattr(model, "init_memory_state", None) or model.init_state
    return begin(1)


@torch.no_grad()
def _state_after(model: nn.Module, text_1N: Tensor, segment_length: int | None) -> State:
    """The state of one row after the text."""
    if text_1N.dim() != 2 or text_1N.shape[0] != 1 or text_1N.shape[1] == 0:
        raise ValueError(f"text_1N of shape {tuple(text_1N.shape)} must be one row of token ids, (1, tokens)")
    reader = as_language_model(model)
    with evaluating(reader):
        state = _empty(model)
        pieces = [text_1N[:, segment] for segment in cut(text_1N.shape[1], segment_length)]
        for out in read_segments(lambda ids, before, _: reader(ids, before), pieces, state, in_place=True):
            state = out.state
    return state


def _put(model: nn.Module, place: nn.Module, state: State) -> InitialState:
    learned = _read(model, state)
    if not learned:
        raise ValueError(
            f"{type(model).__name__} reads no number of this state, so nothing could be trained: its memory is empty "
            "or its gates are closed; give a longer text, or open the gates"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    initial = InitialState(state, learned)
    place.add_module(PLACE, initial)
    return initial


def _read(model: nn.Module, state: State) -> set[str]:
    """Names of the tensors of a state that influence the outputs of the next segment."""
    reader = as_language_model(model)
    asked = map_state(lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, state)
    real = [(name, t) for name, t in named_tensors(asked) if t.requires_grad]
    if not real:
        return set()
    device = next(model.parameters()).device
    with evaluating(reader), torch.enable_grad():
        scores = reader(torch.zeros(1, 2, dtype=torch.long, device=device), asked).outputs.float()
        weight = torch.linspace(-1, 1, scores.numel(), device=device).view_as(
            scores
        )  # a plain sum of probabilities is constant
        given = torch.autograd.grad((scores * weight).sum(), [t for _, t in real], allow_unused=True)
    return {name for (name, _), g in zip(real, given, strict=True) if g is not None and bool((g != 0).any())}
