"""Output caches: mix a trained language model's predictions with the tokens that followed similar contexts.

They need no training and change no layer. A cache takes the model's scores of the next tokens, its hidden states and
the observed tokens, one segment at a time, and returns log-probabilities:

    cache = NeuralCache(size=2000, theta=0.3, lambda_=0.1)
    log_probabilities, state = cache(logits, hidden, next_tokens, state)
"""

from __future__ import annotations

from .hidden_states import hidden_states
from .knn_lm import KNNLM, Datastore
from .neural_cache import NeuralCache
from .output_cache import MixedScores, OutputCache

__all__ = ["KNNLM", "Datastore", "MixedScores", "NeuralCache", "OutputCache", "hidden_states"]
