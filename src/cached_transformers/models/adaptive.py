"""Adaptive embedding and adaptive softmax: rare words get narrow vectors, and are scored only where they occur.

Softmax: Grave et al. 2016 (arXiv:1609.04309). Embedding and shared weights: Baevski & Auli 2018 (arXiv:1809.10853);
github.com/kimiyoung/transformer-xl.

    the vocabulary, commonest word first, is split at the cutoffs into clusters 0..K;  E_i = E // div_value^i
    embedding of a word w of cluster i:  P_i W_i[w]
    log p(w | h) = log softmax_head(w)                            in cluster 0
                 = log softmax_head(i) + log softmax_i(w)         in cluster i > 0
    head = [W_0; C] P_0^T h + b,  tail i = W_i P_i^T h + b_i

Legend: B rows, N tokens, T tokens in a list, D model width, V vocabulary, K clusters after the first, E_i width of
cluster i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one


class AdaptiveEmbedding(nn.Module):
    """Token embeddings with narrower vectors for rarer tokens.

    Every cluster is looked up for every token and the right one is selected: fixed shapes, no synchronisation, and
    sum(D E_i) multiply-adds per token.

    Args:
        vocabulary: V. width: D, of the output.
        cutoffs: ids at which a new cluster begins; none for a single cluster.
        embedding_width: E_0; D when None.
        div_value: ratio of the widths of consecutive clusters. With 1, all clusters share one projection, which is left
            out if their width is D; otherwise each cluster has a projection.

    Raises:
        ValueError: cutoffs that do not ascend inside the vocabulary, or a width below 1.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        cutoffs: Sequence[int] = (),
        *,
        embedding_width: int | None = None,
        div_value: int = 1,
    ) -> None:
        super().__init__()
        self.bounds = [0, *cutoffs, vocabulary]
        if any(low >= high for low, high in pairwise(self.bounds)):
            raise ValueError(
                f"cutoffs={list(cutoffs)} must ascend between 0 and vocabulary={vocabulary}, both excluded"
            )
        widest = width if embedding_width is None else embedding_width
        at_least_one(f" channel, or null for width={width}", embedding_width=embedding_width)
        at_least_one(" (1: all clusters have one width)", div_value=div_value)
        self.widths = [widest // div_value**i for i in range(len(cutoffs) + 1)]
        if self.widths[-1] < 1:
            raise ValueError(
                f"div_value={div_value} leaves clusters of widths {self.widths}, and each needs 1 channel; take fewer "
                "cutoffs, a smaller div_value or a larger embedding_width"
            )
        self.vocabulary, self.width, self.div_value = vocabulary, width, div_value
        self.weights = nn.ParameterList(
            torch.empty(high - low, e) for (low, high), e in zip(pairwise(self.bounds), self.widths, strict=True)
        )
        projected = self.widths if div_value > 1 else [] if widest == width else [widest]
        self.projections = nn.ParameterList(torch.empty(width, e) for e in projected)
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None, projection_std: float = 0.01) -> None:
        """Normal weights and projections; without `std`, truncated normal weights of 0.02 and Xavier projections."""
        for weight in self.weights:
            _initialise(weight, std, _small)
        for projection in self.projections:
            _initialise(projection, None if std is None else projection_std, nn.init.xavier_uniform_)

    def forward(self, inputs_BN: Tensor) -> Tensor:
        """Embeddings (B, N, D) of token ids."""
        each = len(self.projections) > 1
        x: Tensor | None = None
        for index, (low, high) in enumerate(pairwise(self.bounds)):
            local_BN = (inputs_BN - low).clamp(0, high - low - 1)
            found = F.embedding(local_BN, self.weights[index])
            if each:
                found = F.linear(found, self.projections[index])
            x = found if x is None else torch.where((inputs_BN >= low)[..., None], found, x)
        assert x is not None
        return F.linear(x, self.projections[0]) if len(self.projections) == 1 else x


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of the next token, with the clusters of an `AdaptiveEmbedding`.

    Losses have two forms that agree to rounding. The sparse form scores a cluster's words only for targets in that
    cluster: D E_0 + E_0 (c_0 + K) multiply-adds per token and D E_i + E_i |i| more for a token in cluster i; its shapes
    depend on the data, which synchronises a device and breaks compiled graphs. The dense form has fixed shapes and
    scores all V words. Both use every cluster, so data-parallel training finds every parameter used.

    Cluster logits are in the order of the original's TensorFlow form; its PyTorch form has the reverse order.

    Args:
        embedding: defines clusters, widths and tied weights.
        tied: share the words' weights with the embedding.
        tied_projections: share the projections, for all clusters or for each.
        sparse: form of the losses; None takes the dense form only in compiled code.

    Raises:
        ValueError: `tied_projections` has not one entry a cluster.
    """

    def __init__(
        self,
        embedding: AdaptiveEmbedding,
        *,
        tied: bool = True,
        tied_projections: bool | Sequence[bool] = True,
        sparse: bool | None = None,
    ) -> None:
        super().__init__()
        self.bounds, self.sparse = embedding.bounds, sparse
        clusters = len(embedding.widths)
        ties = [tied_projections] * clusters if isinstance(tied_projections, bool) else list(tied_projections)
        if len(ties) != clusters:
            raise ValueError(f"tied_projections={ties} must be one bool, or one for each of the {clusters} clusters")
        self.tied, self.ties = tied, ties
        own = (torch.empty_like(weight) for weight in embedding.weights)
        self.weights = nn.ParameterList(embedding.weights if tied else own)
        shared = list(embedding.projections)
        if len(shared) == 1:
            shared = shared * clusters
        self.projections = nn.ParameterList(
            projection if tie else torch.empty_like(projection)
            for projection, tie in zip(shared, ties if shared else [], strict=True)
        )
        self.bias = nn.Parameter(torch.empty(embedding.vocabulary))
        self.cluster_weight = nn.Parameter(torch.empty(clusters - 1, embedding.widths[0]))
        self.cluster_bias = nn.Parameter(torch.empty(clusters - 1))
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None, projection_std: float = 0.01) -> None:
        """Like the embedding, which initialises tied weights; without `std`, Xavier weights. Biases are zero."""
        if not self.tied:
            for weight in self.weights:
                _initialise(weight, std, nn.init.xavier_uniform_)
        for projection, tie in zip(self.projections, self.ties if len(self.projections) else [], strict=True):
            if not tie:
                _initialise(projection, None if std is None else projection_std, nn.init.xavier_uniform_)
        _initialise(self.cluster_weight, std, _small)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.cluster_bias)

    def forward(self, h_BND: Tensor) -> Tensor:
        """Exact log-probabilities of all words, (B, N, V), in float32 or wider."""
        first = self.bounds[1]
        head = self._head(h_BND)
        parts = [head[..., :first]]
        for index in range(1, len(self.weights)):
            parts.append(head[..., first + index - 1, None] + self._tail(h_BND, index))
        return torch.cat(parts, -1)

    def losses(self, h_BND: Tensor, targets_BN: Tensor, ignore_index: int = -100) -> Tensor:
        """-log p of the targets, (B, N), in float32 or wider; 0 where the target is `ignore_index`."""
        sparse = not torch.compiler.is_compiling() if self.sparse is None else self.sparse
        h_TD, targets_T = h_BND.flatten(0, 1), targets_BN.flatten()
        place_T = targets_T.clamp(0, self.bounds[1] - 1)
        for index, low in enumerate(self.bounds[1:-1]):
            place_T = torch.where(targets_T >= low, self.bounds[1] + index, place_T)
        score_T = self._head(h_TD).gather(1, place_T[:, None])[:, 0]
        for index, (low, high) in enumerate(pairwise(self.bounds[1:]), 1):
            inside_T = (targets_T >= low) & (targets_T < high)
            if sparse:
                where = inside_T.nonzero()[:, 0]
                local = targets_T[where] - low
                # Also without such targets: parameters need a gradient.
                found = self._tail(h_TD[where], index).gather(1, local[:, None])[:, 0]
                score_T = score_T.index_add(0, where, found)
            else:
                local_T1 = (targets_T - low).clamp(0, high - low - 1)[:, None]
                score_T = score_T + torch.where(inside_T, self._tail(h_TD, index).gather(1, local_T1)[:, 0], 0)
        return torch.where(targets_T == ignore_index, 0, -score_T).view_as(targets_BN)

    def _project(self, h: Tensor, index: int) -> Tensor:
        return F.linear(h, self.projections[index].t()) if len(self.projections) else h

    def _head(self, h: Tensor) -> Tensor:
        weight = torch.cat([self.weights[0], self.cluster_weight])
        bias = torch.cat([self.bias[: self.bounds[1]], self.cluster_bias])
        return _log_softmax(F.linear(self._project(h, 0), weight, bias))

    def _tail(self, h: Tensor, index: int) -> Tensor:
        bias = self.bias[self.bounds[index] : self.bounds[index + 1]]
        return _log_softmax(F.linear(self._project(h, index), self.weights[index], bias))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _initialise(parameter: Tensor, std: float | None, otherwise: Callable[[Tensor], Tensor]) -> None:
    if std is None:
        otherwise(parameter)
    else:
        nn.init.normal_(parameter, std=std)


def _small(parameter: Tensor) -> Tensor:
    return nn.init.trunc_normal_(parameter, std=0.02)
