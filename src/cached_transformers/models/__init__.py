"""Models; importing this package registers them all."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..registry import MODELS
from . import hosted as hosted
from .decoder import LanguageModel
from .detector import FasterRCNN, MaskRCNN, RetinaNet
from .encoder import SequenceClassifier
from .encoder_decoder import EncoderDecoder
from .vision_transformer import VisionTransformer

__all__ = [
    "EncoderDecoder",
    "FasterRCNN",
    "LanguageModel",
    "MaskRCNN",
    "RetinaNet",
    "SequenceClassifier",
    "VisionTransformer",
    "create_model",
]


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a registered model by name.

    Raises:
        ValueError: unknown name or option, with a suggestion; or values that do not fit together.
    """
    return MODELS.create(name, **kwargs)
