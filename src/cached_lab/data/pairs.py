"""Source and target of sequence-to-sequence data: two languages, or a damaged text and its original.

Legend: B rows, N source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.layers.token_loss import IGNORED


class Pair(NamedTuple):
    """Token ids of one example, 1-D long, without padding; `decoder_inputs` is as long as `targets`."""

    source: Tensor
    decoder_inputs: Tensor
    targets: Tensor


class PairBatch(NamedTuple):
    """A batch of pairs, padded on the right.

    Attributes:
        inputs: source tokens, long (B, N). padding: bool (B, N), True = padding.
        decoder_inputs: long (B, T); padding does not matter, since the decoder is causal.
        targets: long (B, T), `IGNORED` at padding.
    """

    inputs: Tensor
    padding: Tensor
    decoder_inputs: Tensor
    targets: Tensor


def pad_pairs(pairs: Sequence[Pair], pad: int, multiple: int = 1) -> PairBatch:
    """Collate pairs; both lengths are rounded up to a multiple, so that few shapes occur."""
    rows = len(pairs)
    n, t = (-(-max(len(pair[side]) for pair in pairs) // multiple) * multiple for side in (0, 2))
    inputs, decoder_inputs = torch.full((rows, n), pad), torch.full((rows, t), pad)
    targets = torch.full((rows, t), IGNORED)
    lengths = torch.tensor([len(pair.source) for pair in pairs])
    for row, pair in enumerate(pairs):
        inputs[row, : len(pair.source)] = pair.source
        decoder_inputs[row, : len(pair.decoder_inputs)] = pair.decoder_inputs
        targets[row, : len(pair.targets)] = pair.targets
    return PairBatch(inputs, torch.arange(n) >= lengths[:, None], decoder_inputs, targets)
