"""The part of `CONTRACTS` that is about memories whose layers carry a state which each segment renews: matrices, small
nets, state vectors.
"""

from __future__ import annotations

from contract.contract_row import LEARNED, READS_ITS_OWN, Contract, relative
from contract.costs import (
    DEPTH,
    LAYERS,
    RELATIVE,
    Cost,
    D,
    F,
    H,
    K,
    M,
    N,
    ahn,
    armt,
    block_recurrent,
    caching,
    delta_mem,
    gated_delta,
    lact,
    titans,
    titans_context,
    ttt,
)

RECURRENT: dict[str, Contract] = {
    "ahn": relative(
        options={"length": 3, "sinks": 2},
        bytes_per_row=lambda d: 2 * (8 * d + 8) + 3 * (8 * d + 24) + 2 * d * d + 24,
        cost=Cost({"length": M, "sinks": 2}, lambda: LAYERS * ahn(M + 2), RELATIVE),
    ),
    "ahn/absolute": Contract(
        options={"length": 2, "sinks": 0, "relative": False},
        bytes_per_row=lambda d: 2 * (8 * d + 24) + 2 * d * d + 24,
    ),
    "armt": Contract(
        options={"length": 3, "key_width": 16},
        bytes_per_row=lambda d: DEPTH * 4 * (2 * 3 * 16) * (d + 1) + 8,
        cost=Cost({"length": M, "key_width": 4}, lambda: LAYERS * armt(M, 4, 24)),
    ),
    "armt/full": Contract(
        options={"length": 3, "key_width": 9, "nu": 1, "mask": "full", "correction": False, "value_scale": 0.5},
        bytes_per_row=lambda d: DEPTH * 4 * (2 * 9) * (d + 1) + 8,
        model={"norm": "post", "positions": "relative"},
    ),
    "delta_mem": Contract(
        options={"rank": 4, "half_life": 8.0},
        bytes_per_row=lambda d: 4 * 16 + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"rank": 5}, lambda: LAYERS * delta_mem(5)),
    ),
    "delta_mem/states": relative(
        options={"rank": 3, "states": 2, "gates": "one", "decay": "own", "update": "outside", "half_life": 8.0},
        bytes_per_row=lambda d: 4 * 2 * 9 + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"rank": 5, "states": 2, "gates": "one", "update": "outside"}, lambda: LAYERS * delta_mem(5, 2, 2)),
    ),
    "delta_mem/segment": Contract(
        options={"rank": 4, "write": "segment", "update": "plain"},
        bytes_per_row=lambda d: 4 * 16 + 8,
        cost=Cost({"rank": 5, "write": "segment"}, lambda: LAYERS * (D * 15 + 25 + (15 * D + 3 * 25) / N)),
    ),
    "infini": Contract(
        bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8, cost=Cost({}, lambda: LAYERS * (2 * D * D / H + D))
    ),
    "infini/delta": Contract(
        options={"update": "delta", "first": "gated"},
        bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8,
        exempt={"empty": "the paper's first segment: the gate mixes in what an empty matrix answers, zeros"},
        cost=Cost({"update": "delta", "first": "gated"}, lambda: LAYERS * (3 * D * D / H + 2 * D)),
    ),
    "infini/exact": Contract(
        options={"update": "exact"},
        bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8,
        cost=Cost({"update": "exact"}, lambda: LAYERS * (3 * D * D / H + 2 * D + N * D)),
    ),
    "infini/gated": Contract(
        options={"update": "gated_delta"},
        bytes_per_row=lambda d: 4 * (d * d // 2) + 8,
        cost=Cost({"update": "gated_delta"}, lambda: LAYERS * (gated_delta() + D * D / H + 2 * D * H)),
    ),
    "infini/gated_channels": Contract(
        options={"update": "gated_delta", "decay": "channel"},
        bytes_per_row=lambda d: 4 * (d * d // 2) + 8,
        model={"norm": "post", "positions": "relative"},
    ),
    "block_recurrent": Contract(
        options={"length": 3},
        bytes_per_row=lambda d: (4 * 3 * d + 8) // DEPTH,  # one layer of the two has them
        exempt={"empty": LEARNED},
        cost=Cost({"length": M}, lambda: block_recurrent(M)),
    ),
    "block_recurrent/lstm": Contract(
        options={"length": 3, "layers": "all", "gate": "lstm", "gates": "stretched", "initial_scale": 2.0},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        model={"norm": "post", "positions": "relative"},
        exempt={"empty": LEARNED},
        cost=Cost(
            {"length": M, "layers": "all", "gate": "lstm"}, lambda: LAYERS * (block_recurrent(M) + 4 * D * D * M / N)
        ),
    ),
    "block_recurrent/dual": Contract(
        options={"length": 3, "layers": "all", "gate": "lstm", "form": "dual", "feed_forward": 12},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost(
            {"length": M, "layers": 1, "gate": "lstm", "form": "dual", "feed_forward": F},
            lambda: block_recurrent(M) + (4 * D * D + 4 * D * F) * M / N,
        ),
    ),
    "block_recurrent/single": Contract(
        options={"length": 3, "layers": "all", "gate": "lstm", "form": "single", "feed_forward": 12},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost(
            {"length": M, "layers": 1, "gate": "lstm", "form": "single", "feed_forward": F},
            lambda: block_recurrent(M) + (5 * D * F - 2 * D * D) * M / N,
        ),
    ),
    "block_recurrent/beside_transformer_xl": relative(
        options={"length": 3, "layers": "all"},
        beside=({"name": "transformer_xl", "length": 8},),
        bytes_per_row=lambda d: 4 * 3 * d + 8 + 8 * (4 * d + 8) + 8,
        exempt={"empty": LEARNED},
    ),
    "titans": Contract(
        bytes_per_row=lambda d: 2 * (2 * 4 * (d // 2) ** 2) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"chunk": 4}, lambda: LAYERS * titans(4)),
    ),
    "titans/two_layers": relative(
        options={"layers": 2, "expansion": 2, "mix": "sum", "chunk": 4, "nets": 4, "gates": "stretched"},
        bytes_per_row=lambda d: 4 * (2 * 4 * 4 * (d // 4) ** 2) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"layers": 2, "expansion": 2, "nets": 2}, lambda: LAYERS * titans(N, 2, nets=2)),
    ),
    "titans/context": Contract(
        options={"place": "context", "chunk": 4, "nets": 4},
        bytes_per_row=lambda d: 4 * (2 * 4 * (d // 4) ** 2) + 8,
        cost=Cost({"place": "context", "chunk": 4}, lambda: LAYERS * titans_context(4)),
    ),
    "titans/persistent": Contract(
        options={"place": "context", "persistent": 3, "loss": "huber"},
        bytes_per_row=lambda d: 2 * (2 * 4 * (d // 2) ** 2) + 8,
        exempt={"empty": LEARNED},
        cost=Cost({"place": "context", "chunk": 4, "persistent": 3}, lambda: LAYERS * titans_context(4, 3)),
    ),
    "titans/layer": Contract(
        options={"place": "layer", "chunk": 4, "window": 3},
        bytes_per_row=lambda d: 2 * (2 * 4 * (d // 2) ** 2) + 8 + 4 * 2 * (2 * d + 2),
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"place": "layer", "chunk": 4}, lambda: LAYERS * titans(4)),
    ),
    "ttt": Contract(
        options={"mini_batch": 3},
        bytes_per_row=lambda d: 2 * (2 * 4 * (d // 2) * (d // 2 + 1)) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"mini_batch": 3}, lambda: LAYERS * ttt(3)),
    ),
    "ttt/mlp": relative(
        options={"model": "mlp", "rotary": False, "limit": 1.0},
        bytes_per_row=lambda d: 2 * (2 * 4 * (d // 2) * (8 * (d // 2) + 5)) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost({"model": "mlp"}, lambda: LAYERS * ttt(16, mlp=True)),
    ),
    "lact": Contract(bytes_per_row=lambda d: 12 * d * (d // 4) + 8, cost=Cost({}, lambda: LAYERS * lact(4))),
    "lact/sum": relative(
        options={"nets": 2, "expansion": 2, "momentum": True, "keep": "sum", "rate": 0.1},
        bytes_per_row=lambda d: 2 * 12 * d * d + 8,
        cost=Cost({"nets": 2, "expansion": 2, "momentum": True}, lambda: LAYERS * lact(2, 2, momentum=True)),
    ),
    # Muon makes 500 times of a rounding, so that it is held to the rules in float64, in tests/memories/test_lact.py.
    "lact/apply": Contract(
        options={"nets": 1, "first": "apply", "rate": 0.1},
        bytes_per_row=lambda d: 12 * d * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost({"nets": 1, "expansion": 3, "muon": True}, lambda: LAYERS * lact(1, 3, muon=True)),
    ),
    "memory_caching": Contract(
        options={"slots": 3},
        bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8 + 3 * 4 * (d * d // 2 + d + d) + 8,
        cost=Cost({"slots": K}, lambda: LAYERS * (2 * D * D / H + D + caching(D * D / H + D))),
    ),
    "memory_caching/residual": Contract(
        options={"slots": 2, "read": "residual", "start": "restart", "keep": "powers"},
        bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8 + 2 * 4 * (d * d // 2 + d) + 8,
        cost=Cost({"slots": K, "read": "residual"}, lambda: LAYERS * (1 + K) * (D * D / H + D) + LAYERS * D * D / H),
    ),
    "memory_caching/gated": Contract(
        options={"slots": 2, "start": "restart", "over": {"name": "infini", "update": "gated_delta"}},
        bytes_per_row=lambda d: 4 * (d * d // 2) + 8 + 2 * 4 * (d * d // 2 + d) + 8,
    ),
    "memory_caching/titans": Contract(
        options={"slots": 2, "over": {"name": "titans", "chunk": 4, "nets": 4}, "read": "sparse", "topk": 1},
        bytes_per_row=lambda d: 4 * (2 * 4 * (d // 4) ** 2) + 8 + 2 * 4 * (d * d // 4 + d) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost(
            {"slots": K, "over": {"name": "titans", "chunk": 4}, "read": "sparse"},
            lambda: LAYERS * (titans(4) + caching(D * D / H)),
        ),
    ),
    "memory_caching/soup": Contract(
        options={
            **{"slots": 2, "read": "soup", "start": "restart"},
            "over": {"name": "titans", "chunk": 4, "layers": 2, "expansion": 2, "nets": 4},
        },
        bytes_per_row=lambda d: 4 * (2 * 4 * 4 * (d // 4) ** 2) + 8 + 2 * 4 * (4 * 4 * (d // 4) ** 2 + d) + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost(
            {"slots": K, "over": {"name": "titans", "chunk": 4, "layers": 2, "expansion": 2}, "read": "soup"},
            lambda: LAYERS * (titans(4, 2) + caching(4 * D * D / H)),
        ),
    ),
    "memory_caching/ttt": Contract(
        options={"slots": 2, "over": {"name": "ttt", "mini_batch": 3}},
        bytes_per_row=lambda d: (2 * 2 + 2 * 2) * 4 * (d // 2) * (d // 2 + 1) + 8 + 2 * 4 * d + 8,
        exempt={"empty": READS_ITS_OWN},
        cost=Cost(
            {"slots": K, "over": {"name": "ttt", "mini_batch": 3}}, lambda: LAYERS * (ttt(3) + caching(D * (D / H + 1)))
        ),
    ),
}
