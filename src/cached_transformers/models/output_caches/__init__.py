"""Caches over outputs: what a trained language model predicts, mixed with what followed similar contexts.

They need no training and touch no layer. A cache is given, segment by segment, what the model says of the next tokens,
its hidden states and the tokens that were observed, and gives log-probabilities:

    cache = NeuralCache(size=2000, theta=0.3, lambda_=0.1)
    log_probabilities, state = cache(logits, hidden, next_tokens, state)

One file a paper (`neural_cache`, `knn_lm`); beside them `output_cache` (what both do with what they find), `datastore`
(keys and values of a training text, on disk), `hidden_states` (keys, read off a model) and `along` (for who reads a
text on, and knows no next tokens yet). They are no memories of the seam: what they hold is never seen by a layer.
"""

from __future__ import annotations

from .datastore import Datastore
from .hidden_states import hidden_states
from .knn_lm import KNNLM
from .neural_cache import NeuralCache
from .online import Along
from .output_cache import Mixed, OutputCache

__all__ = ["KNNLM", "Along", "Datastore", "Mixed", "NeuralCache", "OutputCache", "hidden_states"]
