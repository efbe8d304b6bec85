"""Linear attention: its quadratic form, the digits of small features, and the cost formula."""

from __future__ import annotations

import pytest
import torch
from attentions.linearised_twins import average, compare, keys_and_mask, leaves
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.linear import LinearAttention
from cached_transformers.attentions.parts.linearised import elu_features


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_it_is_its_quadratic_form(chunk: int, epsilon: float) -> None:
    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: object) -> Tensor:
        keys, values, mask = keys_and_mask(k, v, causal, seen, context)  # type: ignore[arg-type]
        weights = (F.elu(q) + 1) @ (F.elu(keys) + 1).mT
        return average(weights, values, mask, epsilon)

    compare(LinearAttention(chunk=chunk, epsilon=epsilon), twin)


def test_small_features_keep_their_digits() -> None:
    x = torch.tensor([-40.0, -20.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(elu_features(x).double(), F.elu(x.double()).add(1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(elu_features(x)[:2], x[:2].exp(), rtol=1e-6, atol=0)
    assert (F.elu(x) + 1)[0] == 0  # the usual form

    # Queries that see keys of tiny features alone still average their values; with the usual epsilon nothing is left.
    q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[1.0], [3.0]])[None, None]
    k = torch.full((1, 1, 2, 4), -40.0)
    assert LinearAttention()(q, k, v).out_BHNV.flatten().tolist() == [2.0, 2.0]
    assert LinearAttention(epsilon=1e-6)(q, k, v).out_BHNV.abs().max() < 1e-8


def test_keys_alike_are_averaged_and_queries_may_differ_in_number() -> None:
    given = leaves(8)
    k = given["k"][:, :, :1].expand(-1, -1, 8, -1)
    out = LinearAttention()(given["q"][:, :, :3], k, given["v"]).out_BHNV
    torch.testing.assert_close(out, given["v"].mean(2, keepdim=True).expand(-1, -1, 3, -1), rtol=0, atol=1e-12)
