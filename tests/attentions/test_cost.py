"""Costs of cores: the flop counter counts the multiply-adds of their formulas, here of one row and head.

BP-Transformer, SAC, the layer of ETC and the blocks of the Set Transformer have a test of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attentions.cases import B, E, H

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers.attentions import create_attention, memory_compressed
from cached_transformers.interfaces.memory import Context

V, D = 5, H * E
PAIR = E + V
"""Cost of a query and a key: the product, and the value."""
Row = tuple[str, dict[str, Any], Any, dict[str, Any], float]
"""Name, options, tokens (or queries and keys), options of the call, cost."""


def both_forms(c: bool) -> Iterator[tuple[str, dict[str, Any], Any, float]]:
    """Mechanisms that attend given places, causal (`c`) or not."""
    ends, sides = (1, 2) if c else (2, 3)
    for mode, count in {"row": 16, "col": 6, "sum": 22, "sequential": 6 + 16 * (3 - ends)}.items():
        yield "axial", {"mode": mode, "columns": 16}, 96, 96 * count * PAIR
    for window, random in ((3, 3), (5, 0)):
        blocks = 12 * ((window + 1) // 2 + 1 + random) if c else 2 * 12 + 10 * (window + random + 2)
        yield "bigbird", {"block": 4, "window": window, "random": random}, 48, 16 * PAIR * blocks
    yield "bigbird", {"block": 16, "random": 3}, 48, 48**2 * PAIR
    yield "etc", {"radius": 4, "segment": 6, "clip": 2}, 48, 48 * (PAIR * (sides * 4 + 8) + 7 * E)
    yield "image_transformer", {"block": 8, "memory": 12}, 96, 96 * (8 + 12 * ends) * PAIR
    mapped = {"block": (2, 4), "memory": (2, 1), "size": (10, 8)}
    yield "image_transformer", mapped, 80, 80 * (2 + 2 * ends) * (4 + 2) * PAIR
    for dilation, places in ((1, 0), (1, 3), ((1, 2), 0), (2, 2)):
        options = {"window": 8, "dilation": dilation, "prefix": places}
        yield "longformer", options, 96, 96 * (1.5 * 8 + 2 * places) * PAIR
    yield "memory_compressed", {}, (12, 24), 24 * (E * E + V * V) + 12 * 8 * PAIR
    yield "memory_compressed", {"grouping": "full"}, (12, 24), 48 * (E * E + V * V) + 12 * 8 * PAIR
    for local, block in ((4, 8), (12, 12)):
        yield "memory_compressed", {"local": local}, 24, 24 * (E * E + V * V + 8 * PAIR + sides * block * PAIR)
    near, far, strided, fixed = 4 + 7 * ends, 12, {"stride": 8}, {"stride": 8, "pattern": "fixed", "summary": 2}
    yield "sparse_transformer", strided, 96, 96 * (near + far) * PAIR
    for index, keys in enumerate((near, far)):
        yield "sparse_transformer", {**strided, "combine": "layers", "index": index}, 96, 96 * keys * PAIR
    yield "sparse_transformer", {**strided, "combine": "heads"}, 96, 96 * (near + far) / 2 * PAIR
    for slices in (1, 4):
        yield "sparse_transformer", {**fixed, "slices": slices}, 96, 96 * (8 + far * 2) * PAIR
    for radius, relay in ((1, True), (4, True), (1, False)):
        keys, scan = (radius + 2 + relay, E + 64 + 66 * PAIR) if c else (2 * radius + 2 + relay, E + PAIR)
        yield "star", {"radius": radius, "relay": relay}, 192, 192 * (keys * PAIR + relay * scan)


def chosen() -> Iterator[tuple[str, dict[str, Any], Any, float]]:
    """Mechanisms that choose keys, or compress them, without a causal form or in the other one."""
    for queries, keys in ((24, 24), (20, 9)):
        cost = queries * 8 * E + (2 * 10 - 1) * queries * 4 * 8 + queries * 4 * E + 4 * keys * PAIR
        yield "clustered", {"clusters": 4, "bits": 8}, (queries, keys), cost
        slots = queries + 4 * math.ceil(queries / 4)
        options = {"clusters": 4, "bits": 8, "topk": 3}
        yield "improved_clustered", options, (queries, keys), cost + slots * 3 * PAIR
    for queries, keys in ((24, 24), (20, 60)):
        few, samples = (min(2 * math.ceil(math.log(count)), count) for count in (queries, keys))
        for sampling in ("shared", "own"):
            options = {"sampling": sampling, "factor": 2}
            yield "informer", options, (queries, keys), queries * samples * E + few * keys * PAIR
    for sharing, (queries, keys) in itertools.product(("none", "heads", "keys_values"), ((24, 24), (5, 17))):
        options = {"sharing": sharing, "slots": 4, "length": 24}
        yield "linformer", options, (queries, keys), 4 * (queries + keys) * PAIR
    yield "image_transformer", {"block": 8, "memory": 12, "prefix": 3}, 99, (96 * (8 + 24 + 3) + 3 * 99) * PAIR
    for tokens in (1, 5, 16, 17, 20):  # a short sequence costs no more than softmax attention
        yield "longformer", {"window": 32}, tokens, tokens**2 * PAIR
    for combine, tokens in itertools.product(("softmax", "mean"), (3, 14, 16)):
        size = min(4, tokens)
        cost = 2 * tokens * 3 * E + 3 * size**2 * (PAIR + (3 if combine == "softmax" else 0))
        yield "routing", {"clusters": 3, "window": 4, "combine": combine}, tokens, cost
    for queries, keys in ((9, 9), (4, 7)):
        yield "set_transformer", {"points": 3}, (queries, keys), 3 * (queries + keys) * PAIR
        induced = {"points": 3, "induced_keys": True}
        yield "set_transformer", induced, (queries, keys), 3 * ((queries + keys) * PAIR + keys * E)


def linear() -> Iterator[Row]:
    """Mechanisms of linear cost: 32 tokens in chunks of 8."""
    n, m, causal = 32, 12, {"causal": True}
    yield "linear", {"chunk": 8}, n, {}, 2 * n * E * (V + 1)
    yield "linear", {"chunk": 8}, n, {"slots": 5}, (2 * n + 5) * E * (V + 1)
    yield "linear", {"chunk": 8}, n, causal, n * (8 * (PAIR + 1) + 2 * E * (V + 1))
    plain = 2 * n * m * (PAIR + 1)
    yield "performer", {"features": m, "chunk": 8}, n, {}, plain
    # The normaliser column and each token's own key are sums of products without a matrix product.
    yield "performer", {"features": m, "chunk": 8}, n, causal, plain + n * 7 * (m + V + 1) / 2
    random = {"features": m, "chunk": 8}
    plain = 2 * n * m * E + 2 * n * 2 * m * (V + 1)
    yield "rfa", random, n, {}, plain
    yield "rfa", random, n, {"slots": 5}, plain + 5 * (m * E + 2 * m * (V + 1))
    cost = 2 * n * m * E + n * (8 * (2 * m + V + 1) + 2 * 2 * m * (V + 1))
    yield "rfa", random, n, causal, cost
    yield "rfa", {**random, "gate": True}, n, causal, cost + n * D
    # Delta rules are counted without their triangular systems.
    for options, f in (({}, 2 * E), ({"order": 2}, 4 * E), ({"features": "elu"}, E)):
        yield "delta_net", {"chunk": 8, **options}, n, causal, n * (8 * (2 * f + V) + 3 * f * V) + n * D
    rules, decays = {"delta": (2, 3, D), "sum": (1, 2, 0)}, ("none", "fixed", "scalar", "channel")
    for rule, decay, gate in itertools.product(rules, decays, ("none", "swish")):
        options = {"rule": rule, "decay": decay, "chunk": 8, "value_width": V, "output_gate": gate}
        options |= {"decay_rank": 3} if decay == "channel" else {}
        products, states, beta = rules[rule]
        maps = {"scalar": D, "channel": 3 * (D / H + E)}.get(decay, 0) + (0 if gate == "none" else D * V)
        pairs = 7 * E / 2 if decay == "channel" else 8 * E
        yield "gated_delta", options, n, causal, n * (products * pairs + 8 * V + states * E * V + beta + maps)
    scan = 8 * (2 * E + V) + 3 * E * V
    for options, cost in (
        ({"rule": "gates"}, scan + D * (E + V)),
        ({"steps": 3}, 3 * scan + D * (2 * (E + V) + 3)),
    ):
        yield "gated_delta", {"decay": "fixed", "chunk": 8, "value_width": V, **options}, n, causal, n * cost


def sorted_keys() -> Iterator[Row]:
    """Mechanisms whose cost depends on more of the call."""
    for rounds, lse, (n, filled, keys) in itertools.product(
        (1, 3), (False, True), ((16, 16, 8), (14, 16, 8), (3, 3, 3))
    ):
        options = {"chunk": 4, "rounds": rounds, "buckets": [4, 8]}
        yield "reformer", options, n, {"want_lse": lse}, rounds * filled * (E * 6 + keys * PAIR)
    for n in (3, 14, 16):
        filled, keys = (n, n) if n <= 4 else (16, 8)
        for combine in ("softmax", "mean"):
            options = {"clusters": 3, "window": 4, "combine": combine}
            yield "routing", options, n, {"causal": True}, n * 3 * E + filled * keys * PAIR
    padding, blocks = {"key_padding_mask": torch.zeros(B, 16, dtype=torch.bool)}, 4 * 4 * 4 * PAIR
    for options, cost in (
        ({}, 2 * 16 * 4 * PAIR + blocks + 4 * 4 * E),
        ({"hard": True}, 2 * 16 * 4 * PAIR + 4 * 4 * E),
        ({"sortcut": 2}, 2 * 4 * (16 + 4) * PAIR + 4 * 4 * E),
        ({"sort_net": "mlp", "hidden": 5}, 2 * 16 * 4 * PAIR + blocks + 4 * 5 * (D + 4)),
    ):
        few = options.get("sortcut")
        options = {"block": 4, "length": 24, "iterations": 3, **options}
        yield "sinkhorn", options, 16, {}, cost
        yield "sinkhorn", options, 16, padding, cost + (few or 2) * 16 * 4 + (few or 4) * 4 * 4
        if few is None:
            yield "sinkhorn", options, 3, {}, 9 * PAIR


ROWS: list[Row] = [(*row[:3], {"causal": c}, row[3]) for c in (False, True) for row in both_forms(c)]
ROWS += [*((*row[:3], {}, row[3]) for row in chosen()), *linear(), *sorted_keys()]


@pytest.mark.parametrize(("name", "options", "tokens", "call", "cost"), ROWS)
def test_a_core_costs_what_its_formula_says(
    name: str, options: dict[str, Any], tokens: Any, call: dict[str, Any], cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_compressed, "BLOCK", 8)
    queries, keys = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    width = {"value_width": V} if name == "memory_compressed" else {}
    core = create_attention({"name": name, **width, **options}, width=D, heads=H)
    (q, k, v), x = (
        (torch.randn(B, H, n, e) for n, e in ((queries, E), (keys, E), (keys, V))),
        torch.randn(B, queries, D),
    )
    if slots := call.get("slots"):
        context = Context(
            torch.randn(B, H, slots, E), torch.randn(B, H, slots, V), torch.zeros(B, slots, 1), torch.ones(B, slots) > 0
        )
        call = {"context": context}
    assert count_flops(core, q, k, v, x_BND=x, **call) == 2 * B * H * cost
