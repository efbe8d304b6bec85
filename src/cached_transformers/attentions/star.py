"""Star-Transformer (Guo et al. 2019, arXiv:1902.09113; fastNLP, modules/torch/encoder/star_transformer.py).

Tokens sit on a ring and see their neighbours there; one relay node sees all of them, and all of them see it.

    paper, layer t:  C_i = [h_{i-1}; h_i; h_{i+1}; e_i; r],  h_i <- LN(ReLU(MultiAtt(h_i, C_i)))
                     r <- LN(ReLU(MultiAtt(r, [r; h_1 .. h_N]))),  h = e and r = mean(e) before the first layer
    core:            out_i = softmax(q_i K_i^T / sqrt(E)) V_i,  K_i = [k_{i-R} .. k_{i+R}; k_i; k_r]
                     (k_r, v_r) = softmax(u k^T / sqrt(E)) [k, v],  u learned for each head, 0 at first: the mean

`StarAttention` is the core on plain q, k, v. As projections are linear, the relay's key is the mean of the keys, which
is the paper's relay before its first layer, until u learns to weigh; the embedding is the token itself, so its key
counts twice, as in the paper's first layer. `StarLayer` is the paper's layer, which carries h and r.

Differences from the original implementation: its ring is open and an end attends a key of zeros, here it is closed, as
in the paper; padding is no neighbour of anyone (the ring closes round it) and no part of the relay or of its mean;
where the ring is so short that neighbours on both sides are the same token, that counts once.

The causal form is an extension, the paper has none: the ring is open and has the side of the past only, and token i has
a relay of its own, the prefix softmax r_i over j <= i. One query for all prefixes makes that a linear scan.

Cost: N ((2 R + 3) (E + V) + 2 E + V) multiply-adds a head; causal N ((R + 3) (E + V) + E + C + (C + 2) (E + V)), with
chunks of C = 64 tokens in the scan.

Legend: B rows, H heads, N tokens, K keys that a token sees, L keys that there are, E key width, V value width, D = H E
model width, R radius, M relays (1, or N when causal).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, merge, pick_rows, product
from .parts.pattern import PatternAttention
from .parts.scan import causal_scan
from .parts.sizes import head_width


@ATTENTIONS.register(
    "star",
    paper="arXiv:1902.09113",
    title="Star-Transformer",
    purpose="near tokens and a few that all see",
    equation="softmax over k_{i-R} .. k_{i+R} on a ring, k_i again, and one relay key, the weighted mean of all keys",
    order="N R",
    cost="N ((2 R + 3) (E + V) + 2 E + V) multiply-adds a head",
)
class StarAttention(PatternAttention):
    """Neighbours on a ring, and one relay node that sums all tokens up (the causal form is an extension).

    Args:
        width: D. heads: H.
        radius: R, neighbours on each side.
        embedding: the token's own key once more, for the embedding of the paper's first layer.
        relay: whether there is a relay.
        dropout: share of the weights to drop in training.

    Raises:
        ValueError: a radius below 0, or heads that do not divide the width.
    """

    can = PatternAttention.can | {"causal"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        radius: int = 1,
        embedding: bool = True,
        relay: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(" neighbours; the paper takes 1", least=0, radius=radius)
        self.radius, self.embedding = radius, embedding
        self.relay_HE = nn.Parameter(torch.zeros(heads, head_width(width, heads))) if relay else None

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens, padding_BN = k_BHNE.shape[2], call.key_padding_mask
        index, seen = ring(tokens, self.radius, padding_BN, causal=call.causal, device=q_BHNE.device)
        place_N1 = torch.arange(tokens, device=q_BHNE.device)[:, None]
        there = torch.ones_like(place_N1, dtype=torch.bool)
        if padding_BN is not None:
            there = ~padding_BN[:, None, :, None]
        columns = [(index, seen)]
        if self.embedding:
            columns.append((place_N1, there))
        if self.relay_HE is not None:
            relay_BHME = self._relays(k_BHNE, v_BHNV, call)
            relay_k, relay_v = relay_BHME.split([k_BHNE.shape[-1], v_BHNV.shape[-1]], -1)
            k_BHNE, v_BHNV = torch.cat([k_BHNE, relay_k], 2), torch.cat([v_BHNV, relay_v], 2)
            columns.append(relay_column(there, place_N1 + tokens, causal=call.causal))
        return AttentionOutput(*attend_some(q_BHNE, k_BHNE, v_BHNV, columns, self.drop, want_lse=call.want_lse))

    def _relays(self, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> Tensor:
        """(B, H, M, E + V): key and value of the relay, or of the relay of each token when causal."""
        assert self.relay_HE is not None
        both_BHNV = torch.cat([k_BHNE, v_BHNV], -1)
        padding_BN = call.key_padding_mask
        query_BH1E = self.relay_HE[:, None].expand(len(k_BHNE), -1, -1, -1)
        if call.causal:
            return prefix_attend(query_BH1E, k_BHNE, both_BHNV, padding_BN)[0]
        seen = None if padding_BN is None else ~padding_BN[:, None, None]
        return attend(query_BH1E, k_BHNE, both_BHNV, seen)[0]


def ring(
    tokens: int, radius: int, padding_BN: Tensor | None, *, causal: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Places of a token's neighbours, itself included, and which of them there are: (N, K), or (B, 1, N, K) if padded.

    The ring holds the tokens that are no padding, in their order. It is open when causal.
    """
    # Beyond half the ring both sides meet: each token remains once.
    before = min(radius, tokens - 1 if causal else (tokens - 1) // 2)
    after = 0 if causal else min(radius, tokens // 2)
    offset_K = torch.arange(-before, after + 1, device=device)
    place_N = torch.arange(tokens, device=device)
    if padding_BN is None:
        place_NK = place_N[:, None] + offset_K
        return place_NK % tokens, place_NK >= 0 if causal else torch.ones_like(place_NK, dtype=torch.bool)
    count_B11 = (~padding_BN).sum(1)[:, None, None]
    rank_BNK = ((~padding_BN).cumsum(1) - 1)[..., None] + offset_K
    if causal:
        seen_BNK = (rank_BNK >= 0) & (count_B11 > 0)
    else:
        seen_BNK = (offset_K >= -((count_B11 - 1) // 2)) & (offset_K <= count_B11 // 2) & (count_B11 > 0)
    order_BN = padding_BN.long().argsort(dim=1, stable=True)
    rank_BNK = rank_BNK % count_B11.clamp(min=1)
    index_BNK = order_BN.gather(1, rank_BNK.flatten(1)).unflatten(1, rank_BNK.shape[1:])
    return index_BNK[:, None], seen_BNK.expand_as(index_BNK)[:, None]


def relay_column(there: Tensor, relay_N1: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Index and visibility of the relay: the one after the tokens, or token i's own when causal.

    Args:
        there: which tokens are no padding, (N, 1) or (B, 1, N, 1). relay_N1: index of token i's relay.
    """
    if causal:
        return relay_N1, there.cummax(-2).values
    return relay_N1[:1].expand_as(relay_N1), there.any(-2, keepdim=True).expand_as(there)


def attend_some(
    q_BHNE: Tensor,
    k_BHLE: Tensor,
    v_BHLV: Tensor,
    columns: list[tuple[Tensor, Tensor]],
    dropout: float,
    *,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over the keys that the columns name, each with whether it is seen: N K (E + V) multiply-adds."""
    padded = any(t.dim() == 4 for column in columns for t in column)
    rows, tokens = len(q_BHNE), q_BHNE.shape[2]
    lead = (rows, 1, tokens) if padded else (tokens,)
    index, seen = (torch.cat([t.expand(*lead, t.shape[-1]) for t in part], -1) for part in zip(*columns, strict=True))
    index = index.expand(rows, k_BHLE.shape[1], -1, -1)
    k_BHNKE, v_BHNKV = pick_rows(k_BHLE, index), pick_rows(v_BHLV, index)
    out, lse = attend(q_BHNE[..., None, :], k_BHNKE, v_BHNKV, seen[..., None, :], dropout=dropout, want_lse=want_lse)
    return out[..., 0, :], None if lse is None else lse[..., 0]


def prefix_attend(q_BH1E: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, padding_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, H, N, V) and log-sum-exp: what one query attends in the keys up to each place, N (E + C + (C + 2) V).

    S_i = exp(z_{i-1} - z_i) S_{i-1} + exp(l_i - z_i) v_i with logits l and z_i their log-sum-exp up to i: each step is
    a mean of two, nothing overflows, and no place depends on a later one, not even in rounding.
    """
    logits_BHN = product(k_BHNE, q_BH1E)[..., 0] / k_BHNE.shape[-1] ** 0.5
    if padding_BN is None:
        lse_BHN = logits_BHN.logcumsumexp(-1)
        passed_BHN = lse_BHN[..., :-1] - lse_BHN[..., 1:]
        weight_BHN = (logits_BHN - lse_BHN).exp()
    else:
        lowest = torch.finfo(logits_BHN.dtype).min
        hidden_B1N = padding_BN[:, None]
        none_B1N = hidden_B1N.cummin(-1).values
        # A sum that starts with the lowest number loses nothing, and its logarithm has a gradient.
        lse_BHN = logits_BHN.masked_fill(hidden_B1N, lowest).logcumsumexp(-1)
        passed_BHN = (lse_BHN[..., :-1] - lse_BHN[..., 1:]).masked_fill(none_B1N[..., :-1], 0)
        weight_BHN = (logits_BHN - lse_BHN.masked_fill(none_B1N, 0)).masked_fill(hidden_B1N, -torch.inf).exp()
        lse_BHN = lse_BHN.masked_fill(none_B1N, lowest)
    one_BHN1 = torch.ones_like(weight_BHN)[..., None]
    out, _ = causal_scan(one_BHN1, weight_BHN[..., None], v_BHNV, log_decay_BHNG=F.pad(passed_BHN, (1, 0))[..., None])
    return out, lse_BHN


class StarLayer(nn.Module):
    """One layer of the Star-Transformer: all tokens take in their surroundings, then the relay takes in all tokens.

        layers = nn.ModuleList(StarLayer(width, heads) for _ in range(depth))
        x, relay = embedded, StarLayer.first_relay(embedded, padding)
        for layer in layers:
            x, relay = layer(x, embedded, relay, padding)

    The causal form is an extension: each token has its own relay, which takes in the tokens up to it, and a learned
    vector asks instead of the relay, so that all prefixes share one scan.

    Args:
        width: D. heads: H.
        radius: R, neighbours on each side.
        dropout: share of the attention's weights to drop in training.
        causal: no output depends on a later token.

    Raises:
        ValueError: a radius below 0, or heads that do not divide the width.
    """

    def __init__(self, width: int, heads: int, *, radius: int = 1, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        at_least_one(" neighbours; the paper takes 1", least=0, radius=radius)
        self.heads, self.radius, self.dropout, self.causal = heads, radius, dropout, causal
        size = head_width(width, heads)
        self.query, self.output, self.relay_output = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.keys_values, self.relay_keys_values = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.relay_query = None if causal else nn.Linear(width, width, bias=False)
        self.query_HE = nn.Parameter(torch.zeros(heads, size)) if causal else None
        self.norm, self.relay_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)

    @staticmethod
    def first_relay(x_BND: Tensor, padding_BN: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """(B, M, D): the mean of the tokens that are no padding, or of those up to each token."""
        there_BN1 = torch.ones_like(x_BND[..., :1], dtype=torch.promote_types(x_BND.dtype, torch.float32))
        if padding_BN is not None:
            there_BN1 = there_BN1.masked_fill(padding_BN[..., None], 0)
        kept_BND = torch.where(there_BN1 > 0, x_BND, 0).to(there_BN1.dtype)
        if causal:
            mean = kept_BND.cumsum(1) / there_BN1.cumsum(1).clamp(min=1)
        else:
            mean = kept_BND.sum(1, keepdim=True) / there_BN1.sum(1, keepdim=True).clamp(min=1)
        return mean.to(x_BND.dtype)

    def forward(
        self, x_BND: Tensor, embedded_BND: Tensor, relay_BMD: Tensor, padding_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """New tokens and relay; tokens of padding become 0.

        Args:
            x_BND: tokens. embedded_BND: what the first layer got. relay_BMD: of the layer before, or `first_relay`.
            padding_BN: bool, True = padding.
        """
        tokens, drop = x_BND.shape[1], self.dropout if self.training else 0.0
        place_N1 = torch.arange(tokens, device=x_BND.device)[:, None]
        there = torch.ones_like(place_N1, dtype=torch.bool)
        if padding_BN is not None:
            there = ~padding_BN[:, None, :, None]
        columns = [
            ring(tokens, self.radius, padding_BN, causal=self.causal, device=x_BND.device),
            (place_N1 + tokens, there),
            relay_column(there, place_N1 + 2 * tokens, causal=self.causal),
        ]
        k, v = self._split(self.keys_values(torch.cat([x_BND, embedded_BND, relay_BMD], 1))).chunk(2, -1)
        out, _ = attend_some(self._split(self.query(x_BND)), k, v, columns, drop)
        x_BND = self.norm(F.relu(self.output(out.transpose(1, 2).flatten(2))))
        if padding_BN is not None:
            x_BND = x_BND.masked_fill(padding_BN[..., None], 0)
        out = self._ask(x_BND, relay_BMD, padding_BN, drop)
        return x_BND, self.relay_norm(F.relu(self.relay_output(out.transpose(1, 2).flatten(2))))

    def _ask(self, x_BND: Tensor, relay_BMD: Tensor, padding_BN: Tensor | None, drop: float) -> Tensor:
        """(B, H, M, E): attention of the relay to itself and all tokens."""
        k, v = self._split(self.relay_keys_values(torch.cat([relay_BMD, x_BND], 1))).chunk(2, -1)
        if self.relay_query is not None:
            seen = None if padding_BN is None else F.pad(~padding_BN, (1, 0), value=True)[:, None, None]
            return attend(self._split(self.relay_query(relay_BMD)), k, v, seen, dropout=drop)[0]
        assert self.query_HE is not None
        (relay_k, k), (relay_v, v) = k.chunk(2, 2), v.chunk(2, 2)
        query_BH1E = self.query_HE[:, None].expand(len(k), -1, -1, -1)
        relay_BHN = product(relay_k, query_BH1E)[..., 0] / k.shape[-1] ** 0.5
        return merge(*prefix_attend(query_BH1E, k, v, padding_BN), relay_v, relay_BHN)[0]

    def _split(self, t_BND: Tensor) -> Tensor:
        """(B, H, N, -1): heads apart."""
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
