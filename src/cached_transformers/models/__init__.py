"""Models of this package's own layers; importing this package registers them.

Detectors and models that others wrote stand in `cached_lab.tasks` and `cached_transformers.integrations`;
`cached_transformers.create_model` knows all of them.

One file a model, a folder where it needs several (`encoder_decoder/`, `pvt/`); `stack_options` says what their stacks
are made of, `stack_model` builds them and says where tokens stand. Beside them: `adaptive` (embedding and softmax with
clusters), `initial_weights`, `pretrained` (weights for a backbone), `generation` and `beam_search`; and
`output_caches/`, which mix into the predictions of a trained language model what followed alike contexts.
"""

from __future__ import annotations

from .encoder_decoder import EncoderDecoder
from .language_model import LanguageModel
from .sequence_classifier import SequenceClassifier
from .vision_transformer import VisionTransformer

__all__ = ["EncoderDecoder", "LanguageModel", "SequenceClassifier", "VisionTransformer"]
