"""Position encodings: the property that each is for, and exact values where there is a formula.

Legend: B rows, H heads, N queries, M keys, E head width, D width.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cached_transformers import positions as ps


def places(*values: int) -> torch.Tensor:
    return torch.tensor(values)[None, :, None]


def test_rotary_logits_depend_on_the_difference_of_positions_alone() -> None:
    scheme = ps.RotaryPositions(8)
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.double)

    def logit(i: int, j: int) -> torch.Tensor:
        return scheme.rotate(q, places(i)) @ scheme.rotate(k, places(j)).mT

    for shift in (1, 17, 400):
        torch.testing.assert_close(logit(5 + shift, 2 + shift), logit(5, 2), rtol=0, atol=1e-4)
    assert (logit(5, 2) - logit(5, 3)).abs().max() > 1e-2
    torch.testing.assert_close(logit(0, 0), q @ k.mT, rtol=0, atol=0)


def test_values_of_rotary_sinusoidal_learned_and_no_positions() -> None:
    scheme = ps.RotaryPositions(4)
    t = torch.tensor([1.0, 0.0, 1.0, 0.0])[None, None, None]
    want = [math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)]
    torch.testing.assert_close(scheme.rotate(t, places(3)).flatten(), torch.tensor(want))
    got = ps.SinusoidalPositions(6).embed(places(0, 7))
    want = [[0, 1] * 3, [f(7 * 10000 ** (-i / 6)) for i in (0, 2, 4) for f in (math.sin, math.cos)]]
    torch.testing.assert_close(got[0], torch.tensor(want), rtol=0, atol=1e-6)
    scheme = ps.LearnedPositions(6, 4)
    assert torch.equal(scheme.embed(places(5, 0)), scheme.weight[[5, 0]][None])
    scheme, t = ps.Positions(), torch.randn(1, 1, 2, 4)
    assert scheme.embed(places(1, 2)) is None and scheme.bias(torch.zeros(1), places(1), places(2)) is None
    assert scheme.rotate(t, places(1, 2)) is t


@pytest.mark.parametrize("position", [257, 1001, 30001])
def test_positions_stay_exact_in_half_precision_models(position: int) -> None:
    """bfloat16 has no odd number above 256: angles computed in it would merge neighbours."""
    rotary = ps.RotaryPositions(8)
    t = torch.randn(1, 1, 1, 8)
    exact = rotary.rotate(t, places(position))
    half = rotary.bfloat16().rotate(t.bfloat16(), places(position))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0, atol=0.05)
    sinusoidal = ps.SinusoidalPositions(8)
    assert torch.equal(sinusoidal.bfloat16().embed(places(position)), ps.SinusoidalPositions(8).embed(places(position)))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    bias = ps.ALiBiPositions(heads).bias(torch.zeros(1), places(5), places(2, 5, 6))
    assert bias is not None and bias.shape == (1, heads, 1, 3)
    torch.testing.assert_close(bias[0, :, 0], -torch.tensor(slopes)[:, None] * torch.tensor([3.0, 0, 1]))


def test_relative_bias_has_one_entry_per_offset() -> None:
    scheme = ps.RelativePositionBias2D((2, 3), 2)
    with torch.no_grad():
        scheme.table.copy_(torch.arange(15.0)[:, None] + torch.tensor([0, 100]))
    grid = ps.grid_positions((2, 3))
    assert grid[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    bias = scheme.bias(None, grid, grid)
    assert bias is not None
    for i, (y, x) in enumerate(grid[0].tolist()):
        for j, (v, u) in enumerate(grid[0].tolist()):
            row = (y - v + 1) * 5 + (x - u + 2)
            assert bias[0, :, i, j].tolist() == [row, 100 + row]
    assert len(bias[0, 0].unique()) == 15


def test_schemes_by_name() -> None:
    kinds = {
        "none": ps.Positions,
        "learned": ps.LearnedPositions,
        "sinusoidal": ps.SinusoidalPositions,
        "rotary": ps.RotaryPositions,
        "alibi": ps.ALiBiPositions,
        "relative": ps.RelativePositions,
    }
    for name, kind in kinds.items():
        assert type(ps.make_positions(name, width=8, heads=2, length=5)) is kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "learned", "width": 8, "heads": 2}, "learned positions need a length"),
        ({"name": "rotery", "width": 8, "heads": 2}, "unknown positions 'rotery'.*rotary"),
        ({"name": "rotary", "width": 6, "heads": 2}, "rotary positions need an even head width, got 3"),
        ({"name": "sinusoidal", "width": 7, "heads": 1}, "sinusoidal positions need an even width, got width=7"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.make_positions(arguments.pop("name"), **arguments)


def test_relative_positions_are_the_formula_in_each_of_their_forms() -> None:
    heads, e, n, m = 2, 6, 4, 3
    q = torch.randn(2, heads, n, e, dtype=torch.double)
    keys = torch.arange(10, 10 + m + n)[None, :, None].expand(2, -1, -1)
    queries = keys[:, m:]

    def formula(scheme: ps.RelativePositions, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Transformer-XL's position terms, one pair of places at a time, without the content terms."""
        bias = torch.zeros(2, heads, q_positions.shape[1], k_positions.shape[1], dtype=torch.double)
        for b, h, i, j in itertools.product(*map(range, bias.shape)):
            distance = int(q_positions[b, i, 0] - k_positions[b, j, 0])
            limit = scheme.clamp or 10**9
            distance = max(-limit, min(limit, distance))
            w = [distance * 10000 ** (-2 * k / (heads * e)) for k in range(heads * e // 2)]
            code = torch.tensor([math.sin(a) for a in w] + [math.cos(a) for a in w], dtype=torch.double)
            r = scheme.project.weight[h * e : (h + 1) * e] @ code
            bias[b, h, i, j] = (q[b, h, i] + scheme.position_bias[h]) @ r / math.sqrt(e)
        return bias

    for clamp in (None, 2):
        scheme = ps.RelativePositions(heads, e, clamp=clamp).double()
        want = formula(scheme, queries, keys)
        seen = torch.ones(n, m + n, dtype=torch.bool).tril(m)
        run = scheme.bias(q, queries, keys, causal_run=True)
        torch.testing.assert_close(run[..., seen], want[..., seen], rtol=0, atol=1e-6)
        torch.testing.assert_close(scheme.bias(q, queries, keys), want, rtol=0, atol=1e-6)
        strange = torch.tensor([[[3], [900], [7], [0]], [[5], [5], [1], [44]]])
        got = scheme.bias(q, strange, keys)
        torch.testing.assert_close(got, formula(scheme, strange, keys), rtol=0, atol=2e-4)
        gradient = torch.autograd.grad(run[..., seen].sum(), [scheme.project.weight], retain_graph=True)
        other = torch.autograd.grad(scheme.bias(q, queries, keys)[..., seen].sum(), [scheme.project.weight])
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5)


def test_relative_positions_far_out_are_as_exact_as_near() -> None:
    scheme, q = ps.RelativePositions(2, 4), torch.randn(1, 2, 3, 4)
    near, far = places(0, 1, 2), places(*(3_000_000 + i for i in range(3)))
    torch.testing.assert_close(scheme.bias(q, far, far), scheme.bias(q, near, near), rtol=0, atol=1e-6)
