"""Models built from the layers of this package; importing it registers them for `cached_transformers.create_model`.

One file a model, a folder where a model needs several (`encoder_decoder/`, `pvt/`). `stack_options` holds the options
of their stacks, `stack_model` builds the stacks.
"""

from __future__ import annotations

from .encoder_decoder import EncoderDecoder
from .language_model import LanguageModel
from .sequence_classifier import SequenceClassifier
from .vision_transformer import VisionTransformer

__all__ = ["EncoderDecoder", "LanguageModel", "SequenceClassifier", "VisionTransformer"]
