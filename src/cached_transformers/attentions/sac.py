"""SAC, Sparse Adaptive Connection (Li et al. 2020, arXiv:2003.09833; no public code that we know of).

Tokens are nodes; a recurrent predictor chooses A edges for each of them, one after the other, and a token attends what
its edges lead to, and itself ("all nodes connected"):

    s_t = LSTM(s_{t-1}, n_{a_{t-1}} + d_{a_{t-1} - i}),   the first input: n_i + source
    p(a_t = j) = softmax_j(s_t (n_j + d_{j - i}) / sqrt(F)) over nodes not chosen yet;   n = W x,  d: clipped distances
    out_i = softmax over {i, a_1 .. a_A}

In training edges are drawn, in evaluation the most probable ones are taken. A choice has no gradient, so that the
predictor learns by REINFORCE: `PolicyGradient` makes its loss, - (R - b) sum_t ln p(a_t) with a running mean b, from
the rewards R and the log-probabilities that the cores keep of their last call in training.

Cost: N (A + 1) (E + V) multiply-adds a head for the attention; for the choice N D F + N A (8 F^2 + F (N + 2 k + 1)),
where the second term is per head with `per_head`. The choice is quadratic: it weighs every node A times.

Differences and choices where the paper is silent: edges are drawn without replacement and never lead to the token
itself, which is seen anyway; scores are divided by sqrt(F); no gradient of the predictor reaches the layer's input.
The causal form chooses from the past. `learn="straight_through"` is no part of the paper: the most probable edges are
taken in training too, and ln p of an edge, less its value, is added to the edge's logit, which changes no output and
lets the task's own loss train the predictor.

Legend: B rows, H heads, C choices (H or 1 for all heads), N tokens, M keys, E key width, V value width, A edges,
K = A + 1, D model width, F width of the predictor, L distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import one_softmax, pick_rows, product, wide, zero_unseen
from .parts.pattern import PatternAttention


class Edges(NamedTuple):
    """Choices of each token: places, their validity (a token may run out of nodes), and ln p of each (or 0).

    ln p is there where it was asked for.
    """

    index_BCNA: Tensor
    there_BCNA: Tensor
    log_p_BCNA: Tensor | None = None


def attend_edges(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNV: Tensor,
    edges: Edges,
    *,
    padding_BN: Tensor | None = None,
    added_BCNA: Tensor | None = None,
    dropout: float = 0.0,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each token's softmax over itself and the tokens that its edges lead to; and the log-sum-exp where it is wanted.

    Args:
        padding_BN: padding sees and is nothing.
        added_BCNA: added to the logits of the edges.
    """
    rows, choices, tokens, _ = edges.index_BCNA.shape
    self_N1 = torch.arange(tokens, device=q_BHNE.device)[:, None]
    index_BCNK = torch.cat([edges.index_BCNA, self_N1.expand(rows, choices, -1, -1)], -1)
    there_BCNK = F.pad(edges.there_BCNA, (0, 1), value=True)
    if padding_BN is not None:
        there_BCNK = there_BCNK & ~padding_BN[:, None, :, None]
    index_BHNK = index_BCNK.expand(-1, k_BHNE.shape[1], -1, -1)
    k_BHNKE, v_BHNKV = (pick_rows(t, index_BHNK) for t in (k_BHNE, v_BHNV))
    logits_BHNK = product(k_BHNKE, q_BHNE[..., None, :])[..., 0] / math.sqrt(q_BHNE.shape[-1])
    if added_BCNA is not None:
        logits_BHNK = logits_BHNK + F.pad(added_BCNA, (0, 1))
    weights_BHNK, lse_BHN = one_softmax(logits_BHNK, there_BCNK, dropout=dropout, want_lse=want_lse)
    out_BHNV = (weights_BHNK.to(v_BHNV.dtype)[..., None, :] @ v_BHNKV)[..., 0, :]
    return zero_unseen(out_BHNV, there_BCNK), lse_BHN


class EdgePredictor(nn.Module):
    """Chooses edges for each token, one after the other, without replacement.

    Args:
        width: D. hidden: F. choices: C. clip: k, the largest distance with a vector of its own.
    """

    def __init__(self, width: int, hidden: int, choices: int, clip: int) -> None:
        super().__init__()
        self.clip = clip
        self.nodes = nn.Linear(width, hidden, bias=False)
        self.cell = nn.LSTMCell(hidden, hidden)
        self.source_CF = nn.Parameter(torch.empty(choices, hidden))
        self.distance_LF = nn.Parameter(torch.empty(2 * clip + 1, hidden))
        for table in (self.source_CF, self.distance_LF):
            nn.init.uniform_(table, -(hidden**-0.5), hidden**-0.5)

    def forward(
        self,
        x_BND: Tensor,
        count: int,
        *,
        causal: bool = False,
        padding_BN: Tensor | None = None,
        draw: bool = False,
        tell: bool = False,
        generator: torch.Generator | None = None,
        given_BCNA: Tensor | None = None,
    ) -> Edges:
        """Choose `count` edges a token, or as many as there are other tokens.

        Args:
            causal: from the past alone. padding_BN: is not chosen, and chooses nothing.
            draw: draw edges; the most probable ones without. tell: also ln p of each edge.
            given_BCNA: take these edges, which are different ones for each token.
        """
        (rows, tokens), choices = x_BND.shape[:2], len(self.source_CF)
        place_N = torch.arange(tokens, device=x_BND.device)
        n_BNF = self.nodes(x_BND)
        free_BCNN = (place_N < place_N[:, None] if causal else place_N != place_N[:, None]).expand(
            rows, choices, -1, -1
        )
        if padding_BN is not None:
            free_BCNN = free_BCNN & ~(padding_BN[:, None, None] | padding_BN[:, None, :, None])
        far_NN = self._label(place_N - place_N[:, None])
        given_BCNF, state = n_BNF[:, None] + self.source_CF[:, None], None
        index: list[Tensor] = []
        there: list[Tensor] = []
        log_p: list[Tensor] = []
        for step in range(min(count, tokens - 1)):
            if step:
                last_BCN = index[-1]
                nodes_BCNF = pick_rows(n_BNF[:, None].expand(-1, choices, -1, -1), last_BCN)
                given_BCNF = nodes_BCNF + self.distance_LF[self._label(last_BCN - place_N)]
            state = self.cell(given_BCNF.flatten(0, 2), state)
            s_BCNF = state[0].view(rows, choices, tokens, -1)
            by_distance = (s_BCNF @ self.distance_LF.mT).gather(-1, far_NN.expand(rows, choices, -1, -1))
            scores = (s_BCNF @ n_BNF[:, None].mT + by_distance) / math.sqrt(s_BCNF.shape[-1])
            scores = wide(scores).masked_fill(~free_BCNN, torch.finfo(scores.dtype).min)
            if given_BCNA is not None:
                chosen_BCN = given_BCNA[..., step]
            elif draw:
                # The largest of the scores with Gumbel noise is a draw from their softmax.
                noise = torch.empty_like(scores).exponential_(generator=generator).log()
                chosen_BCN = (scores - noise).masked_fill(~free_BCNN, -torch.inf).argmax(-1)
            else:
                chosen_BCN = scores.argmax(-1)
            there.append(free_BCNN.gather(-1, chosen_BCN[..., None])[..., 0])
            if tell:
                log_p_BCN = scores.log_softmax(-1).gather(-1, chosen_BCN[..., None])[..., 0]
                log_p.append(torch.where(there[-1], log_p_BCN, 0))
            index.append(chosen_BCN)
            free_BCNN = free_BCNN & (place_N != chosen_BCN[..., None])
        if not index:
            none_BCNA = place_N.new_zeros(rows, choices, tokens, 0)
            return Edges(none_BCNA, none_BCNA.bool(), none_BCNA.to(n_BNF.dtype))
        return Edges(torch.stack(index, -1), torch.stack(there, -1), torch.stack(log_p, -1) if log_p else None)

    def _label(self, far: Tensor) -> Tensor:
        return far.clamp(-self.clip, self.clip) + self.clip


@ATTENTIONS.register(
    "sac",
    paper="arXiv:2003.09833",
    title="SAC",
    purpose="keys chosen by content",
    equation="softmax over a token and the A tokens that a recurrent predictor chose for it",
    order="N A (the choice N^2 A)",
    cost="N (A + 1) (E + V) multiply-adds a head; the choice N A (8 F^2 + N F) for all heads",
)
class SAC(PatternAttention):
    """Attention over a few edges per token, which a recurrent predictor chooses from the layer's input.

    With `learn="policy"` edges are drawn in training, so that two calls differ, as with dropout, and the task's loss
    gives the predictor no gradient: without `PolicyGradient` its edges stay as random as they began.

    Args:
        width: D. heads: H.
        edges: A, edges that each token chooses.
        hidden: F, width of the predictor; D when None.
        clip: k, the largest distance with a vector of its own in the predictor.
        per_head: each head chooses its own edges.
        learn: how the predictor learns, "policy" (with `PolicyGradient`) or "straight_through".
        dropout: share of the weights to drop in training.

    Attributes:
        log_p_B: sum of ln p of the last choice that was drawn, per row, for `PolicyGradient`; None without one.

    Raises:
        ValueError: edges, hidden or clip below 1; an unknown `learn`; a call without the layer's input.
    """

    can = PatternAttention.can | {"causal"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        edges: int = 8,
        hidden: int | None = None,
        clip: int = 32,
        per_head: bool = False,
        learn: str = "policy",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(edges=edges, hidden=hidden, clip=clip)
        if learn not in ("policy", "straight_through"):
            raise ValueError(f"learn={learn!r} must be 'policy' (the paper's) or 'straight_through'")
        self.edges, self.learn = edges, learn
        self.predictor = EdgePredictor(width, hidden or width, heads if per_head else 1, clip)
        self.log_p_B: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy without choices; those of the original belong to a graph, which cannot be copied."""
        return {**self.__dict__, "log_p_B": None}

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        if call.x_BND is None:
            raise ValueError("attention SAC chooses edges by the layer's input: pass it as x_BND")
        padding_BN = call.key_padding_mask
        edges = self.predictor(
            call.x_BND.detach(),
            self.edges,
            causal=call.causal,
            padding_BN=padding_BN,
            draw=self.training and self.learn == "policy",
            tell=self.training,
            generator=call.generator,
        )
        added = None
        if self.training and edges.log_p_BCNA is not None:
            if self.learn == "policy":
                self.log_p_B = edges.log_p_BCNA.sum((1, 2, 3))
            else:
                added = edges.log_p_BCNA - edges.log_p_BCNA.detach()
        result = attend_edges(
            q_BHNE,
            k_BHNE,
            v_BHNV,
            edges,
            padding_BN=padding_BN,
            added_BCNA=added,
            dropout=self.drop,
            want_lse=call.want_lse,
        )
        return AttentionOutput(*result)


class PolicyGradient(nn.Module):
    """The loss that trains the predictors of all SAC cores of a model: - mean over rows of (R - b) ln p(edges).

    The baseline b is a running mean of the rewards before this call; of the first call, the mean of its own rewards.

    Args:
        momentum: share of the baseline that stays at each call in training.

    Raises:
        ValueError: a momentum outside [0, 1).
    """

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum={momentum} must lie in [0, 1)")
        self.momentum = momentum
        self.baseline: Tensor
        self.calls: Tensor
        self.register_buffer("baseline", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, model: nn.Module, reward_B: Tensor) -> Tensor:
        """The loss for one reward a row (such as minus its task loss), to be added to the task's.

        Raises:
            ValueError: no SAC core of the model drew edges since the last call, or for other rows.
        """
        cores = [m for m in model.modules() if isinstance(m, SAC) and m.log_p_B is not None]
        if not cores:
            raise ValueError("no SAC core drew edges: run the model in training mode, with learn='policy', before this")
        log_p_B = torch.stack([core.log_p_B for core in cores if core.log_p_B is not None]).sum(0)
        if reward_B.shape != log_p_B.shape:
            raise ValueError(f"rewards of shape {tuple(reward_B.shape)} for {len(log_p_B)} rows: give one a row")
        for core in cores:
            core.log_p_B = None
        reward_B = reward_B.detach().to(self.baseline.dtype)
        mean = reward_B.mean()
        before = torch.where(self.calls > 0, self.baseline, mean)
        if self.training:
            with torch.no_grad():
                self.baseline.copy_(before + (1 - self.momentum) * (mean - before))
                self.calls += 1
        return -((reward_B - before) * log_p_B).mean()
