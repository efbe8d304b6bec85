"""Rows of `CONTRACTS` of the memories that choose slots by a score."""

from __future__ import annotations

from contract.contract_row import Contract, detached, detached_relative
from contract.costs import LAYERS, RELATIVE, Cost, D, H, M, N, window

FORCED = {"sinks": 1, "observe": 2}
"""Tokens that stay whatever their score. Rules of keys get places in these ("sinusoidal"): equal keys would tie."""


def chosen(slots: int) -> float:
    """A window of keys and values that are stored."""
    return window(slots) - 2 * D * D * slots / N


def expected_attention(slots: int) -> float:
    """Sums over queries; the mean rotation of these, and their products with keys."""
    width = D // H
    return D * width + ((slots + N) * D * (width + 1) + 2 * D * width * (width + 1)) / N


def merging(slots: int, queries: int) -> float:
    """Logits, least squares for biases and values, and eleven products for the projected descent."""
    merged, keys = slots - 3, slots + N
    solved = 2 * queries * merged + queries * queries
    return queries * D * (2 * keys + slots) + solved * (D + H) + 11 * queries * merged * H


SCORED: dict[str, Contract] = {
    "h2o": detached_relative(
        options={"length": 3, "heavy": 5},
        bytes_per_row=lambda d: 8 * (8 * d + 4 * 2) + 8,
        exact={"length": 32, "heavy": 32},
        cost=Cost({"length": M // 2, "heavy": M // 2}, lambda: LAYERS * (chosen(M) + (M + N) * D), RELATIVE),
    ),
    "h2o/window": detached(
        options={"length": 3, "heavy": 5, "observe": 2, "relative": False},
        bytes_per_row=lambda d: 8 * (8 * d + 4 * 2) + 8,
        exact={"length": 32, "heavy": 32},
    ),
    "snapkv": detached_relative(
        options={"length": 8, **FORCED},
        bytes_per_row=lambda d: 8 * 8 * d + 8,
        exact={"length": 64},
        cost=Cost({"length": M, **FORCED}, lambda: LAYERS * (chosen(M) + 2 * (M + N) * D / N), RELATIVE),
    ),
    "snapkv/pyramid": detached(
        options={"length": 8, "kernel": 3, "budget": "pyramid", "beta": 2, "relative": False, **FORCED},
        bytes_per_row=lambda d: 8 * 8 * d + 8,
        exact={"length": 128},
    ),
    **dict.fromkeys(
        ("knorm", "keydiff"),
        detached(
            options={"length": 8, "relative": False, **FORCED},
            bytes_per_row=lambda d: 8 * 8 * d + 8,
            exact={"length": 64},
            model={"positions": "sinusoidal"},
            cost=Cost({"length": M, **FORCED}, lambda: LAYERS * chosen(M), RELATIVE),
        ),
    ),
    "keydiff/rotated": detached(
        options={"length": 8, "rotated": True, "relative": False, **FORCED},
        bytes_per_row=lambda d: 8 * 8 * d + 8,
        exact={"length": 64},
        model={"positions": "rotary"},
    ),
    "lagkv": detached(
        options={"length": 8, "relative": False, **FORCED},
        bytes_per_row=lambda d: 8 * (8 * d + 4 * 2) + 8,
        exact={"length": 64},
        model={"positions": "sinusoidal"},
        cost=Cost({"length": M, **FORCED}, lambda: LAYERS * chosen(M), RELATIVE),
    ),
    "expected_attention": detached(
        options={"length": 8, "future": 5, **FORCED},
        bytes_per_row=lambda d: 8 * 8 * d + 16 + 4 * (d + d * d // 2),
        exact={"length": 64},
        model={"positions": "rotary"},
        cost=Cost({"length": M, **FORCED}, lambda: LAYERS * (2 * M * D + expected_attention(M))),
    ),
    "attention_matching": detached(
        options={"length": 8, "queries": 3, **FORCED},
        bytes_per_row=lambda d: 8 * (8 * d + 4 * 2) + 3 * (4 * d + 8) + 16,
        exact={"length": 64},
        model={"positions": "rotary"},
        cost=Cost({"length": M, "queries": 3, **FORCED}, lambda: LAYERS * (2 * M * D + merging(M, 3) / N)),
    ),
}
