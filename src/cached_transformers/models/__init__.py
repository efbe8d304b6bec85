"""Models of this package's own layers; importing this package registers them.

Detectors and models that others wrote stand in `cached_transformers.tasks` and `cached_transformers.integrations`;
`cached_transformers.create_model` knows all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_transformers.registry import MODELS

from .encoder_decoder import EncoderDecoder
from .language_model import LanguageModel
from .sequence_classifier import SequenceClassifier
from .vision_transformer import VisionTransformer

__all__ = ["EncoderDecoder", "LanguageModel", "SequenceClassifier", "VisionTransformer", "create_model"]


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a registered model by name.

    Raises:
        ValueError: unknown name or option, with a suggestion; or values that do not fit together.
    """
    return MODELS.create(name, **kwargs)
