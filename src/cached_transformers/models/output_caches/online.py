"""A cache over outputs for who reads a text on, and knows of a segment what it has read and not what follows.

Legend: B rows, N tokens of a segment, D width of a key, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.state import State

from .output_cache import OutputCache


class Along:
    """Goes along with the reading of a text: what followed a token is observed when the next one is read.

    Example:
        >>> mix = Along(NeuralCache(size=500, theta=0.3, lambda_=0.1))
        >>> out = model(ids, output_hidden_states=True)   # a decoder of transformers, segment after segment
        >>> log_probabilities = mix(out.logits, out.hidden_states[-1], ids)

    Args:
        cache: the cache; its state is kept here.
        state: with which the first segment begins; None for rows that have observed nothing.

    Attributes:
        state: of all pairs that are complete.
    """

    def __init__(self, cache: OutputCache, state: State | None = None) -> None:
        self.cache, self.state = cache, state
        self._last_B1D: Tensor | None = None

    @torch.no_grad()
    def __call__(self, logits_BNV: Tensor, h_BND: Tensor, tokens_BN: Tensor) -> Tensor:
        """Mixed log-probabilities (B, N, V) of what follows each token.

        Args:
            logits_BNV: the model's. h_BND: its hidden states. tokens_BN: the tokens that it read, N >= 1.

        Raises:
            ValueError: shapes that do not fit.
        """
        if self.state is None:
            self.state = self.cache.init_state(len(h_BND), h_BND)
        if self._last_B1D is not None:
            self.state = self.cache.write(self.state, self._last_B1D, tokens_BN[:, :1])
        unknown_B1 = torch.full_like(tokens_BN[:, :1], IGNORED)
        next_BN = torch.cat([tokens_BN[:, 1:], unknown_B1], 1)
        out = self.cache(logits_BNV, h_BND, next_BN, self.state)
        self.state, self._last_B1D = out.state, h_BND[:, -1:].detach().clone()
        return out.log_probabilities
