"""Slow twin of `translate`: the target is read from its beginning at every step, without a KV cache."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cached_lab.tasks.translation.translate import Translation, translate
from cached_transformers.models.encoder_decoder import Encoded, EncoderDecoder


class WholeTarget:
    def __init__(self, model: EncoderDecoder, encoded: Encoded, first_B: Tensor) -> None:
        self.model, self.encoded, self.tokens_BT = model, encoded, first_B[:, None]

    def after(self) -> tuple[()]:
        return ()

    def read(self) -> Tensor:
        return self.model.decode(self.tokens_BT, self.encoded, last_only=True)[:, 0].log_softmax(-1)

    def append(self, token_B: Tensor) -> None:
        self.tokens_BT = torch.cat([self.tokens_BT, token_B[:, None]], 1)

    def multiply(self, times: int) -> None:
        self.choose(torch.arange(len(self.tokens_BT)).repeat_interleave(times))

    def choose(self, rows_B: Tensor) -> None:
        hidden_BND, padding_BN = self.encoded.hidden_BND[rows_B], self.encoded.padding_BN
        padding_BN = None if padding_BN is None else padding_BN[rows_B]
        self.encoded = self.encoded._replace(hidden_BND=hidden_BND, padding_BN=padding_BN)
        self.tokens_BT = self.tokens_BT[rows_B]


def translate_rereading(model: EncoderDecoder, inputs_BN: Tensor, **options: Any) -> Translation:
    with patch("cached_lab.tasks.translation.translate.CachedTarget", WholeTarget):
        return translate(model, inputs_BN, **options)
