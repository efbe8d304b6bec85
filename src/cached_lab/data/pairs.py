"""What sequence-to-sequence data are made of: a source and a target, be it two languages, or a damaged text and what is
to be restored of it.

Legend: B rows, N source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.layers.token_loss import IGNORED


class Pair(NamedTuple):
    """Token ids of one example, 1-D long, without padding; the decoder reads `decoder_inputs`, which is as long as
    `targets`, and is to say `targets`."""

    source: Tensor
    decoder_inputs: Tensor
    targets: Tensor


class PairBatch(NamedTuple):
    """Pairs of a batch, padded behind their ends.

    Attributes:
        inputs: source tokens, long (B, N). padding: bool (B, N), True = padding.
        decoder_inputs: long (B, T); what stands behind an end is of no account, as the decoder is causal.
        targets: long (B, T), `IGNORED` behind an end.
    """

    inputs: Tensor
    padding: Tensor
    decoder_inputs: Tensor
    targets: Tensor


def pad_pairs(pairs: Sequence[Pair], pad: int, multiple: int = 1) -> PairBatch:
    """A batch of pairs; both lengths are rounded up to a multiple, so that few shapes occur."""

    def length(longest: int) -> int:
        return -(-longest // multiple) * multiple

    rows = len(pairs)
    n = length(max(len(pair.source) for pair in pairs))
    t = length(max(len(pair.targets) for pair in pairs))
    inputs, decoder_inputs = torch.full((rows, n), pad), torch.full((rows, t), pad)
    targets = torch.full((rows, t), IGNORED)
    lengths = torch.tensor([len(pair.source) for pair in pairs])
    for row, pair in enumerate(pairs):
        inputs[row, : len(pair.source)] = pair.source
        decoder_inputs[row, : len(pair.decoder_inputs)] = pair.decoder_inputs
        targets[row, : len(pair.targets)] = pair.targets
    return PairBatch(inputs, torch.arange(n) >= lengths[:, None], decoder_inputs, targets)
