"""Build any registered model: ours, timm's or transformers'.

Importing this module fills `registry.MODELS`; it imports neither timm nor transformers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_transformers.integrations.timm.modeling import TimmModel as TimmModel
from cached_transformers.integrations.transformers.modeling import TransformersModel as TransformersModel
from cached_transformers.registry import MODELS


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a registered model by name.

    Args:
        name: "language_model", "vision_transformer", "timm", ... (`MODELS.names()` lists them).
        **kwargs: options of the model; its class documents them.

    Raises:
        ValueError: unknown name or option, with a suggestion; or values that do not fit together.
    """
    return MODELS.create(name, **kwargs)
