"""Models of others by name, with a memory added."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from ..extras import require
from ..integrations.adapters import add_memory
from ..layers.block import ModelOutput
from ..memories import MemorySpec
from ..registry import MODELS


@MODELS.register("timm")
class TimmModel(nn.Module):
    """A timm image classifier by name, through `add_memory`.

    Args:
        architecture: name in timm, e.g. "vit_small_patch16_224", or in `integrations.timm_models`, e.g. "pvt_tiny_grc".
        classes: number of outputs.
        memory: None, a name, or {"name": ..., option: value}.
        pretrained: load timm's published weights (needs network).
        options: passed on to timm.create_model (drop_path_rate, img_size, ...).
    """

    def __init__(
        self,
        architecture: str = "vit_small_patch16_224",
        classes: int = 1000,
        memory: MemorySpec = None,
        pretrained: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        timm = require("timm", extra="vision")
        importlib.import_module("..integrations.timm_models", __package__)  # our models by name
        if not timm.is_model(architecture):
            raise ValueError(f"timm knows no model {architecture!r}; timm.list_models() lists them")
        self.model = timm.create_model(architecture, pretrained=pretrained, num_classes=classes, **options)
        if memory is not None:
            add_memory(self.model, memory)

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """timm's own gradient checkpointing."""
        self.model.set_grad_checkpointing(enabled)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay: positions, class tokens, tables of relative positions."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    def forward(self, inputs_BCHW: Tensor, state: Any = None, *, padding: Tensor | None = None) -> ModelOutput:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits = self.model(inputs_BCHW)
        return ModelOutput(logits, (), logits.new_zeros(()))
