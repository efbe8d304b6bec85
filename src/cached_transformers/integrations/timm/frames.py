"""Memories with a state in timm's ViT and DeiT: one frame a call, the state is given in and comes back.

    out = model(frames, memory_state=state);   state = out.state;   out.outputs is what timm's model gives

Every call returns a `ModelOutput`: the plain tensors of timm's models have no place for a state.

Legend: B rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from cached_transformers.integrations.build_memories import build_memories, refuse_second
from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.integrations.loop_wrappers import FramesModel
from cached_transformers.integrations.memory_hooks import MemoryHook, refuse_forgetting, run_host
from cached_transformers.integrations.memory_lookup import like_weights
from cached_transformers.integrations.segment_context import SegmentContext
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.memories.parts.composite import recipe_of
from cached_transformers.state import State, kind_of, seal
from cached_transformers.state import check as check_state


def add_frame_memory(
    model: nn.Module, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any], **sizes: Any
) -> None:
    """Give timm's model a memory with a state, in place (ValueError: it does not suit, or has a `segment_length`)."""
    if (length := sizes.get("segment_length")) is not None:
        raise ValueError(f"segment_length={length} is for texts; {type(model).__name__} reads images; leave it out")
    layer_sites = [site for site, _ in found]
    if layer_sites[0].holder("patch_embed") is not model:
        raise ValueError(
            f"{type(model).__name__} would not pass memory_state on to the model inside; give add_memory that one"
        )
    refuse_second(model, *(site.layer for site in layer_sites))
    _, layers = build_memories(model, model, found, name, settings)
    hooks: list[MemoryHook] = []
    for (site, host), memory in zip(found, layers, strict=True):
        if memory.needs:
            hooks.append(MemoryHook(site, host, len(hooks)))
            hooks[-1].install(memory)
    forward = FrameForward(model, hooks)
    vars(model)["for_loops"] = functools.partial(FramesModel, model)
    vars(model).update(forward=forward.forward, init_memory_state=forward.init_state, uninstall_memory=_uninstall)


def _uninstall(model: nn.Module) -> None:
    for name in ("forward", "init_memory_state", "for_loops"):
        del vars(model)[name]


class FrameForward:
    """The forward of a ViT whose layers carry a state."""

    def __init__(self, model: nn.Module, hooks: list[MemoryHook]) -> None:
        self.model: Any = model
        self.hooks = hooks
        self.recipe = recipe_of([hook.memory for hook in hooks])
        self.kind = kind_of(self.recipe)

    def init_state(self, rows: int) -> StackState:
        """State of rows that have seen nothing (ValueError: less than one row)."""
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        layers = tuple(hook.memory.init_state(rows, like_weights(hook.layer)) for hook in self.hooks)
        clock_B = torch.zeros(rows, dtype=torch.long, device=like_weights(self.hooks[0].layer).device)
        return seal(StackState(clock_B, (), layers, clock_B.new_empty(rows, 0, self.kind)))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, *args: Any, memory_state: State | None = None, **kwargs: Any) -> ModelOutput:
        """The model's forward of one frame of each row.

        Raises:
            ValueError: a state of another model or number of rows, none in training; a mask; activation checkpointing.
        """
        if memory_state is None:
            refuse_forgetting(self.model)
        elif not torch.compiler.is_compiling():
            check_state(memory_state, self.init_state(1), len(x), memory=self.recipe)
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise ValueError("masks: beside a memory a frame is read whole; leave attn_mask and is_causal out")
        if getattr(self.model, "grad_checkpointing", False) and self.model.training:
            raise ValueError(
                "grad_checkpointing: timm runs blocks again without the memory's state; call "
                "model.set_grad_checkpointing(False), and use ReplayLoop to save activations"
            )
        state = self.init_state(len(x)) if memory_state is None else memory_state
        context = SegmentContext(state.layers)
        outputs = run_host(context, self.hooks, self.model, x)
        after = state._replace(clock_B=state.clock_B + 1, layers=tuple(context.states_after))
        return ModelOutput(outputs, seal(after), x.new_zeros(()))
