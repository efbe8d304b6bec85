"""Parts of the formulas of `CONTRACTS`: costs of a token or an image with each memory, and bytes of CRTN's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

DEPTH = 2
"""Layers of the models that are held to the contract."""
B, N, D, H, F, LAYERS = 3, 8, 32, 4, 48, 2
"""Sizes of the counted models, all different from a memory's: rows, tokens of a segment, width, heads, width of the
feed-forward, layers."""
M, K, R = 20, 5, 4
"""Slots of a memory; neighbours; regions."""
RELATIVE = {"positions": "relative"}


class Cost(NamedTuple):
    """Multiply-adds a token in the whole model, with the memory's options and the model's."""

    options: dict[str, Any]
    formula: Callable[[], float]
    model: dict[str, Any] | None = None


class ImageCost(NamedTuple):
    """Multiply-adds a row and layer in training and in evaluation, with the memory's options."""

    options: dict[str, Any]
    train: float
    evaluate: float


def delta_mem(rank: int, gates: int = 0, states: int = 1) -> float:
    """Maps and corrections; and what chunks take of each matrix, with a place more than tokens."""
    size, gates = rank * states, gates or rank
    values = size // gates
    return D * (5 * size + gates) + (1 + 1 / N) * gates * ((N + 1) * (2 * rank + values) + 3 * rank * values)


def window(slots: int) -> float:
    """Keys and values of hidden states, scores, values, scores of positions, and the table of these for all rows."""
    return 2 * D * D * slots / N + 3 * slots * D + D * D * slots / (B * N)


def side(slots: int) -> float:
    """A second attention over `slots` vectors, with projections of its own."""
    return 2 * D * D * (1 + slots / N) + 2 * slots * D


def own_positions(slots: int) -> float:
    """Cost of relative positions in a model without memory, if the memory's replace them."""
    return D * (N + 1) + D * D / B


def layer(tokens: float) -> float:
    """Projections and feed-forward of one layer, for `tokens` more a token."""
    return tokens * (4 * D * D + 2 * D * F)


def gated_delta() -> float:
    """Multiply-adds of a segment's write in one chunk; its triangular systems are not counted."""
    return D * (2 * D / H + N)


def ahn(slots: int) -> float:
    """Slots, gates, M's answer and its map, and the tokens that leave."""
    e = D / H
    return window(slots) - 2 * D * D * slots / N + 3 * D * H + 2 * D * e + gated_delta()


def armt(tokens: int, key: int, features: int) -> float:
    """Cost of reading by segment and memory tokens, and of what the memory tokens store."""
    read, stored = D * key + features * (D + 1), D * key + D * D + D + features * (2 * D + 1)
    attention = 2 * D * tokens * (2 + tokens / N)
    return layer(tokens / N) + attention + (1 + tokens / N) * read + tokens / N * stored


def block_recurrent(states: int) -> float:
    """Query, output and two attentions of a token; and the maps of the states, and what they see of themselves."""
    return 2 * D * D + 4 * states * D + states / N * (6 * D * D + 2 * states * D)


def titans(chunk: int, expansion: int = 0, nets: int = H) -> float:
    """Projections and gates; what errors, reading and learning take of each matrix; and the coefficients."""
    key = D // nets
    size, ends = (2 * expansion * key**2, 2 * (expansion + 1)) if expansion else (key**2, 2)
    return 3 * D * D + 3 * D * nets + nets * ((5.5 if expansion else 5) * size + chunk * (ends * key + chunk + 1))


def titans_context(chunk: int, persistent: int = 0) -> float:
    """Projections, gates and what is read; keys and values, and attention over them; and what is learned."""
    key, slots = D // H, N + persistent
    read, learned = 3 * D * D + 3 * D * H + D * key, H * (3 * key**2 + chunk**2 + chunk)
    return read + 2 * D * D * slots / N + 2 * slots * D + learned


def caching(ask: float) -> float:
    """Cost of queries, of their similarity to the contexts of K snapshots, and of the snapshots' answers."""
    return D * D + K * (D + ask)


def ttt(mini_batch: int, mlp: bool = False) -> float:
    """Projections and rates; errors, reading and learning of all places of mini-batches that N tokens can touch."""
    key, size = D // H, min(mini_batch, N)
    numbers = key * (8 * key + 5) if mlp else key * (key + 1)
    place = 4 * numbers + (4 * key**2 + size * (10 * key + 2) if mlp else size * (2 * key + 1))
    places = size * ((N + mini_batch - 2) // mini_batch + 1)
    return 3 * D * D + D * H + H * place * places / N


def lact(nets: int, expansion: int = 1, muon: bool = False, momentum: bool = False) -> float:
    """Reading and its scale, writing and its rates, the share of momentum; and the steps of Newton-Schulz."""
    key = D // nets
    inner = expansion * key
    steps = 15 * nets * (2 * key**2 * inner + key**3) / N if muon else 0
    return 9 * D * inner + (5 if momentum else 4) * D * nets + steps


def infinity_former(chunk: int = 4, basis: int = 12, samples: int = 10) -> float:
    signal = D * D + 2 * basis * D + 2 * H * basis + 2 * basis * D * D / N
    refits = 2 * (samples + chunk) * basis * D / chunk
    return LAYERS * (window(M + chunk - 1) + signal + refits)


def crtn(topk: int, key_width: int = 24) -> float:
    slots = topk * N
    positions = D * D + H * D * (slots + N) - own_positions(slots)
    summaries = 2 * N * D * key_width / N + R * key_width / N
    return LAYERS * (2 * D * D * slots / N + 2 * slots * D + positions) + summaries


def crtn_by_token(key_width: int = 24) -> float:
    slots = R * N
    attention = window(slots) - slots * D + (R + 1) * (slots + N) * D - N * D
    return LAYERS * attention + (N + 1) * D * key_width + R * key_width


TOKENS, C = 17, 16
"""Tokens of an image, its class token among them, which is as many as the cache has slots; and its channels."""
READ = TOKENS * C * C + 2 * TOKENS * TOKENS * C
"""Queries, scores and values."""
ONCE = TOKENS * C * C / B
"""One product of the cache with a matrix, which serves all rows."""


def crtn_bytes(d: int, regions: int, segment: int = 9) -> int:
    """Keys, hidden states of all layers, positions, sizes; and the source of the next query."""
    return regions * (4 * DEPTH * segment * d + 4 * d + 8 * segment + 8) + 4 * segment * d


# "name/label" holds the memory to the contract a second time, with other options.
