"""The ETC layer with a separate global sequence (Ainslie et al. 2020, arXiv:2004.08483;
github.com/google-research/google-research/tree/master/etcmodel); the equation is in etc.py.

    token:  softmax over all global tokens and the tokens at most r places away
    global token:  softmax over all global tokens and all tokens

Legend: B rows, H heads, N tokens, G global tokens, D model width, E key width, V value width, M all keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .etc import Labels, check_sizes, tokens_see
from .parts.building_blocks import one_softmax, zero_unseen


class ETCLayer(nn.Module):
    """Post-norm attention and feed-forward over a sequence and a global sequence.

    Both sequences share the projections of queries, keys and values and the feed-forward with its norm; each has its
    own output projection, labels and attention norm.

    Args:
        width: D. heads: H.
        hidden: width of the feed-forward; 4 D when None.
        radius, clip: as in `ETC`.
        dropout: on weights and sublayers.

    Raises:
        ValueError: the width is no multiple of the heads; radius or clip below 1; a dropout outside [0, 1).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        radius: int = 84,
        clip: int | None = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(radius, clip)
        if heads < 1 or width % heads:
            raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must lie in [0, 1)")
        self.heads, self.radius, self.dropout = heads, radius, nn.Dropout(dropout)
        self.qkv = nn.Linear(width, 3 * width)
        self.output, self.global_output = nn.Linear(width, width), nn.Linear(width, width)
        self.labels, self.global_labels = (
            None if clip is None else Labels(heads, width // heads, clip, between=True) for _ in range(2)
        )
        self.norm, self.global_norm, self.last_norm = (nn.LayerNorm(width, eps=1e-12) for _ in range(3))
        hidden = hidden or 4 * width
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.trunc_normal_(linear.weight, std=0.02, a=-0.04, b=0.04)
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        x_BND: Tensor,
        global_BGD: Tensor,
        *,
        segment_BN: Tensor | None = None,
        padding_BN: Tensor | None = None,
        padding_BG: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both sequences after the layer.

        Args:
            segment_BN: index of each token's global token, -1 for none; when None, global tokens get equal runs.
            padding_BN: True = padding, of the tokens. padding_BG: of the global tokens.
        """
        (rows, tokens), count = x_BND.shape[:2], global_BGD.shape[1]
        if segment_BN is None:
            segment_BN = (torch.arange(tokens, device=x_BND.device) * count // max(tokens, 1)).expand(rows, -1)
        padding_BN = x_BND.new_zeros(rows, tokens, dtype=torch.bool) if padding_BN is None else padding_BN
        padding_BG = x_BND.new_zeros(rows, count, dtype=torch.bool) if padding_BG is None else padding_BG
        label_BNG = segment_BN[..., None] == torch.arange(count, device=x_BND.device)
        qkv, global_qkv = (
            [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(t).chunk(3, -1)]
            for t in (x_BND, global_BGD)
        )
        drop = self.dropout.p if self.training else 0.0
        out, _ = tokens_see(
            qkv,
            global_qkv[1:],
            self.labels,
            label_BNG,
            ~padding_BG[:, None],
            radius=self.radius,
            padding_BN=padding_BN,
            dropout=drop,
        )
        seen_B11M = ~torch.cat([padding_BG, padding_BN], 1)[:, None, None]
        global_out = self._globals(global_qkv, qkv[1:], label_BNG, seen_B11M)
        y_BND = self.norm(x_BND + self.dropout(self.output(out.transpose(1, 2).flatten(2))))
        y_BGD = self.global_norm(global_BGD + self.dropout(self.global_output(global_out.transpose(1, 2).flatten(2))))
        y_BND, y_BGD = (self.last_norm(y + self.feed_forward(y)) for y in (y_BND, y_BGD))
        return y_BND, y_BGD

    def _globals(
        self, global_qkv: Sequence[Tensor], kv: Sequence[Tensor], label_BNG: Tensor, seen_B11M: Tensor
    ) -> Tensor:
        """Attention of the global tokens over all global tokens and all tokens."""
        (q, kg, vg), (k, v), labels = global_qkv, kv, self.global_labels
        q = q / math.sqrt(q.shape[-1])
        to_globals, to_tokens = q @ kg.mT, q @ k.mT
        if labels is not None:
            place_G = torch.arange(q.shape[2], device=q.device)
            to_globals = to_globals + labels.by_distance(q[:, :, None], place_G - place_G[:, None])[:, :, 0]
            to_tokens = to_tokens + labels.by_segment(q, label_BNG.mT[:, None])
        dropout = self.dropout.p if self.training else 0.0
        weights, _ = one_softmax(torch.cat([to_globals, to_tokens], -1), seen_B11M, dropout=dropout)
        return zero_unseen(weights.to(v.dtype) @ torch.cat([vg, v], 2), seen_B11M)
