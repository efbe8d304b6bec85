"""Models of timm by name, with a memory added."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cached_transformers.annotations import shown
from cached_transformers.checks import at_least_one
from cached_transformers.extras import refused_by, require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories import OneMemory
from cached_transformers.registry import MODELS
from cached_transformers.state import State


@MODELS.register("timm")
class TimmModel(nn.Module):
    """A timm image classifier by name, through `add_memory`.

    Args:
        architecture: name in timm, e.g. "vit_small_patch16_224", or of `integrations.timm`, e.g. "pvt_tiny_grc".
        classes: number of outputs.
        memory: None, a name, or {"name": ..., option: value}.
        pretrained: load timm's published weights (needs network).
        options: passed on to timm.create_model (drop_path_rate, img_size, ...).
    """

    def __init__(
        self,
        architecture: str = "vit_small_patch16_224",
        classes: int = 1000,
        memory: OneMemory | None = None,
        pretrained: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        timm = require("timm", extra="vision")
        from cached_transformers.integrations.timm import timm_models  # noqa: F401  (registers our models in timm)

        if not timm.is_model(architecture):
            raise ValueError(f"architecture={architecture!r}: timm knows no such model; timm.list_models() lists them")
        at_least_one(classes=classes)
        with refused_by("timm", f"{architecture} with {shown(options)}"):
            self.model = timm.create_model(architecture, pretrained=pretrained, num_classes=classes, **options)
        if memory is not None:
            if any(isinstance(module, LayerMemory) for module in self.model.modules()):
                raise ValueError(f"architecture={architecture!r} comes with a memory of its own; leave memory out")
            add_memory(self.model, memory)
        self.remembers = hasattr(self.model, "init_memory_state")
        if self.remembers:
            vars(self)["for_loops"] = vars(self.model)["for_loops"]

    def init_state(self, batch_size: int) -> State:
        """State of rows that have seen no frame; an empty one without a memory that carries one."""
        return self.model.init_memory_state(batch_size) if self.remembers else ()

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """timm's own gradient checkpointing."""
        self.model.set_grad_checkpointing(enabled)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay: positions, class tokens, tables of relative positions."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    def forward(self, inputs_BCHW: Tensor, state: Any = None, *, padding: Tensor | None = None) -> ModelOutput:
        """Logits (B, classes) of images (B, C, H, W).

        Args:
            state: of a memory that carries one, after the frames before these; None for first ones in evaluation.

        Raises:
            ValueError: images of another size than that which the model was built for, where it takes no other; no
                state where they train a memory that carries one.
        """
        patches: Any = getattr(self.model, "patch_embed", None)
        size = tuple(inputs_BCHW.shape[-2:])
        if getattr(patches, "strict_img_size", False) and tuple(patches.img_size) != size:
            height, width = patches.img_size
            raise ValueError(
                f"images of {size[0]} x {size[1]}, but the model was built for {height} x {width}; give img_size="
                f"{size[0] if size[0] == size[1] else list(size)} (model.img_size in a recipe), or images of that size"
            )
        if self.remembers:
            return self.model(inputs_BCHW, memory_state=state)  # type: ignore[no-any-return]
        logits = self.model(inputs_BCHW)
        return ModelOutput(logits, (), logits.new_zeros(()))
