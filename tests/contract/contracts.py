"""The one place for what the tests need said about a memory, `CONTRACTS`: small sizes, the formulas of its state's size
and of its cost, and the rules that it is exempt from, each with the reason.
"""

from __future__ import annotations

from contract.contract_row import (
    DROPPED,
    FEEDBACK,
    LEARNED,
    NOTHING,
    SHARED,
    UNREAD,
    Contract,
    detached,
    detached_relative,
    relative,
    stateless,
)
from contract.costs import (
    DEPTH,
    LAYERS,
    ONCE,
    READ,
    RELATIVE,
    TOKENS,
    B,
    C,
    Cost,
    D,
    ImageCost,
    K,
    M,
    N,
    R,
    crtn,
    crtn_by_token,
    crtn_bytes,
    infinity_former,
    layer,
    own_positions,
    side,
    window,
)
from contract.recurrent_contracts import RECURRENT
from contract.scored_contracts import SCORED

CONTRACTS: dict[str, Contract] = {
    "none": stateless(exempt={"remembers": "there is no memory"}),
    "convolution": stateless(
        exempt={
            "remembers": "a control that keeps nothing",
            "empty": "a control: its convolution acts from the first segment on",
            "learns:vision_transformer": UNREAD,
        },
        image_cost=ImageCost({}, 9 * (TOKENS - 1) * D / 0.5, 9 * (TOKENS - 1) * D / 0.5),
    ),
    "grc": stateless(
        exempt={
            "remembers": SHARED,
            "empty": "a cache of zeros is read and mixed like any other (Algorithm 1 starts so)",
        },
        image_cost=ImageCost({}, READ + 4 * TOKENS * C * C + 4 * ONCE, READ),
    ),
    "grc/released": stateless(
        options={"variant": "released"},
        models=("vision_transformer",),
        exempt={"remembers": SHARED, "empty": "as grc", "learns": UNREAD},
    ),
    "grc_stream": Contract(
        options={"length": 4},
        bytes_per_row=lambda d: 2 * 4 * (d // 2) * 4 + 8,
        cost=Cost(
            {"length": M, "ratio": 0.5},
            lambda: LAYERS * (D / 2) * (6 * M * D / 2 / N + D / 2 + 2 * M * D / 2 / N + 2 * M),
        ),
    ),
    "grc_stream/text": Contract(
        options={"length": 4, "preset": "text"},
        bytes_per_row=lambda d: 2 * 4 * d * 4 + 8,
        cost=Cost({"length": M, "preset": "text"}, lambda: LAYERS * (4 * D * D * M / N + 2 * M * D)),
    ),
    "grc_stream/beside_transformer_xl": relative(
        options={"length": 4},
        beside=({"name": "transformer_xl", "length": 8},),
        bytes_per_row=lambda d: 2 * 4 * (d // 2) * 4 + 8 + 8 * (4 * d + 8) + 8,
    ),
    "transformer_xl": detached_relative(
        options={"length": 8},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64},
        cost=Cost({"length": M}, lambda: LAYERS * window(M), RELATIVE),
    ),
    "transformer_xl/absolute": detached(
        options={"length": 8, "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64},
        cost=Cost({"length": M, "relative": False}, lambda: LAYERS * (2 * D * D * M / N + 2 * M * D)),
    ),
    "transformer_xl/same_length": detached(
        options={"length": 8, "same_length": True, "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 8},
    ),
    "transformer_xl/kv": detached_relative(
        options={"length": 8, "keep": "kv"},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64, "keep": "kv"},
        cost=Cost({"length": M, "keep": "kv"}, lambda: LAYERS * (window(M) - 2 * D * D * M / N), RELATIVE),
    ),
    "streaming_llm": detached_relative(
        options={"length": 6, "sinks": 2},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 16,
        exact={"length": 64},
        cost=Cost({"length": M, "sinks": 2}, lambda: LAYERS * window(M + 2), RELATIVE),
    ),
    "streaming_llm/kv": detached(
        options={"length": 6, "sinks": 2, "keep": "kv", "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 16,
        exact={"length": 64, "keep": "kv"},
    ),
    "tova": detached_relative(
        options={"length": 8},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64},
        cost=Cost({"length": M, "places": "cache"}, lambda: LAYERS * (window(M) + (M + N) * D / N), RELATIVE),
    ),
    "tova/cache": detached(
        options={"length": 8, "places": "cache", "keep": "kv", "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64, "places": "cache", "keep": "kv"},
    ),
    "expire_span": detached_relative(
        options={"length": 8, "ramp": 4, "price": 0.01},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64, "longest": 1e4, "initial": 0.99, "evict": True},
        cost=Cost(
            {"length": M, "relative": False, "price": 0.0},
            lambda: LAYERS * (2 * D * D * M / N + D * (M + N) / N + 2 * M * D),
        ),
    ),
    "expire_span/evict": detached(
        options={"length": 6, "longest": 30, "ramp": 9, "evict": True, "loss": "mean", "relative": False},
        bytes_per_row=lambda d: 6 * (4 * d + 8) + 8,
        exact={"length": 64, "longest": 1e4, "initial": 0.99, "evict": True},
    ),
    "block_retrieval": detached(
        options={"sinks": 2, "recent": 4, "block": 2, "topk": 2, "capacity": 6},
        bytes_per_row=lambda d: 8 * DEPTH * d * (2 + 5 + 12) + 8 * 2 + 24,
        exact={"sinks": 1, "recent": 2, "block": 3, "topk": 20, "capacity": 20},
        cost=Cost(
            {"sinks": 2, "recent": 6, "block": 3, "topk": K, "capacity": 8},
            lambda: LAYERS * (2 * (2 + 8 + 3 * K) * D + 8 * 3 * D / N),
        ),
    ),
    "block_retrieval/layer": detached(
        options={
            **{"sinks": 0, "recent": 3, "block": 3, "topk": 1, "capacity": 3, "score": "bounds", "observe": 3},
            **{"vote": "layer", "places": "same"},
        },
        bytes_per_row=lambda d: 8 * DEPTH * d * (5 + 9) + 8 * DEPTH + 24,
        exact={"sinks": 3, "recent": 64, "places": "cache"},
    ),
    "segatron": detached(
        options={"length": 8, "sentence_ends": (1, 4, 6), "paragraph_ends": (2,), "widths": (6, 6, 4)},
        bytes_per_row=lambda d: 16 + DEPTH * (8 * (4 * d + 24) + 8),
        exact={"length": 64},
        exempt={"empty": "tokens of one segment know their distance in sentences too; tests/memories has the rule"},
        cost=Cost(
            {"length": M},
            lambda: LAYERS * (2 * D * D * M / N + 2 * M * D + 3 * D * (M + N) + D * D * (M + N) / (B * N)),
        ),
    ),
    "segatron/given_positions": detached_relative(
        options={"length": 8, "sentence_ends": (1,), "same_length": True},
        bytes_per_row=lambda d: 16 + DEPTH * (8 * (4 * d + 24) + 8),
        exact={"length": 8},
    ),
    "ernie_doc": detached_relative(
        options={"length": 4},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        cost=Cost({"length": M}, lambda: LAYERS * window(M), RELATIVE),
    ),
    "ernie_doc/zeros": detached(
        options={"length": 4, "start": "zeros", "longest": 10},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        exempt={"empty": "the release's start: rows of zeros that are attended"},
    ),
    "ernie_doc/kv": detached_relative(
        options={"length": 4, "keep": "kv"},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        cost=Cost({"length": M, "keep": "kv"}, lambda: LAYERS * (window(M) + 2 * D * D * (1 - M / N)), RELATIVE),
    ),
    "infinity_former": detached_relative(
        options={"length": 4, "chunk": 2, "basis": 8, "widths": (0.1, 0.2), "kl_weight": 0.0},
        bytes_per_row=lambda d: 5 * (4 * d + 8) + 8 + 4 * 8 * d + 8,
        cost=Cost({"length": M, "chunk": 4, "basis": 12, "samples": 10}, infinity_former, RELATIVE),
    ),
    "infinity_former/uniform": detached(
        options={
            **{"length": 1, "chunk": 4, "basis": 12, "widths": (0.05, 0.1), "samples": 9, "kl_weight": 0.0},
            **{"sampling": "uniform", "relative": False, "normalise": False},
        },
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8 + 4 * 12 * d + 8,
    ),
    "memorizing": detached(
        options={"length": 8, "k": 4},
        bytes_per_row=lambda d: (8 * 8 * d + 8) // DEPTH,  # one layer of the two has it
        cost=Cost({"length": M, "k": K}, lambda: M * D + 2 * K * D),
    ),
    "memorizing/joint": detached(
        options={"length": 16, "k": 16, "joint": True},  # all: half precision puts near neighbours in another order
        bytes_per_row=lambda d: (16 * 8 * d + 8) // DEPTH,
    ),
    "memorizing/layer": detached(
        options={"length": 64, "k": 3, "layer": 1},
        bytes_per_row=lambda d: (64 * 8 * d + 8) // DEPTH,
        cost=Cost({"length": M, "k": M - K}, lambda: 2 * M * D),
        exempt={"remembers": "keys have no positions: the first layer's store knows the tokens, not their order"},
    ),
    "memory_transformer": stateless(
        options={"length": 3},
        exempt={"remembers": NOTHING, "empty": LEARNED},
        cost=Cost({"length": M}, lambda: LAYERS * (layer(M / N) + 2 * D * M * (2 + M / N))),
    ),
    "memory_transformer/control": stateless(
        options={"length": 3, "control": True, "mask": "causal"},
        exempt={"remembers": NOTHING, "empty": LEARNED, "learns": DROPPED},
    ),
    "memory_transformer/cache": detached_relative(
        options={"length": 3, "cache": 4},
        bytes_per_row=lambda d: DEPTH * (4 * (4 * d + 8) + 8),
        exempt={"empty": LEARNED},
    ),
    "memory_transformer/encoder": stateless(
        options={"length": 3},
        models=("sequence_classifier", "vision_transformer"),
        exempt={"remembers": NOTHING, "empty": LEARNED},
    ),
    "memory_transformer/back": stateless(
        options={"length": 3, "place": "back", "control": True},
        models=("sequence_classifier", "vision_transformer"),
        exempt={"remembers": NOTHING, "empty": LEARNED, "learns": DROPPED},
    ),
    "rmt": Contract(
        options={"length": 3},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost({"length": M}, lambda: LAYERS * (layer(2 * M / N) + 4 * D * M * (2 + 2 * M / N))),
    ),
    "rmt/causal": Contract(
        options={"length": 3, "mask": "causal", "initial_carry": 0.5},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        model={"norm": "post", "positions": "relative"},
        exempt={"empty": LEARNED},
    ),
    "rmt/slots": Contract(
        options={"length": 3, "slots": 2},
        bytes_per_row=lambda d: 2 * 4 * 3 * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost(
            {"length": M, "slots": K},
            lambda: (
                LAYERS * (layer(3 * M / N) + 6 * D * M * (2 + 3 * M / N)) + M / N * (10 + 2 * K + 2 * K * M / D) * D * D
            ),
        ),
    ),
    "rmt/cache": relative(
        options={"length": 3, "cache": 4},
        bytes_per_row=lambda d: 4 * 3 * d + 8 + DEPTH * (4 * (4 * d + 8) + 8),
        exempt={"empty": LEARNED},
    ),
    "rmt/read_cache": Contract(
        options={"length": 3, "cache": 4, "read_cache": True, "mask": "causal"},
        bytes_per_row=lambda d: 4 * 3 * d + 8 + DEPTH * (4 * (4 * d + 8) + 8),
        exempt={"empty": LEARNED},
    ),
    **RECURRENT,
    **SCORED,
    "memformer": Contract(
        options={"length": 3},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        exempt={"empty": LEARNED},
        cost=Cost({"length": M}, lambda: LAYERS * side(M) + side(M)),
    ),
    "crtn": relative(
        options={"segment": 9, "regions": 4, "topk": 2, "rescale": True},
        bytes_per_row=lambda d: crtn_bytes(d, 4),
        cost=Cost({"segment": N, "regions": R, "topk": 2, "key_width": 24}, lambda: crtn(2), RELATIVE),
    ),
    "crtn/compute_first": relative(
        options={"segment": 9, "query": "compute_first", "summary": "bilstm", "regions": 3, "placed": "packed"},
        bytes_per_row=lambda d: crtn_bytes(d, 3),
        exempt={"recomputes": "the last segment's first run serves the next one; no backward asks for it"},
        cost=Cost(
            {"segment": N, "regions": R, "topk": 2, "key_width": 24, "query": "compute_first"},
            lambda: crtn(2) + LAYERS * (layer(1) + 2 * N * D + own_positions(0)),
            RELATIVE,
        ),
    ),
    "crtn/token": Contract(
        options={"segment": 9, "scope": "token", "summary": "mlp", "regions": 3, "relative": False, "empty": "compete"},
        bytes_per_row=lambda d: crtn_bytes(d, 3),
        cost=Cost({"segment": N, "regions": R, "key_width": 24, "scope": "token"}, crtn_by_token, RELATIVE),
    ),
    "crtn/draft": relative(
        options={
            **{"segment": 9, "regions": 3, "query": "compute_first", "scope": "token", "summary": "mean"},
            **{"short_memory": 1, "renormalise": "softmax", "rescale": True, "scale": True},
        },
        bytes_per_row=lambda d: crtn_bytes(d, 4),
    ),
    "crtn/segment": Contract(
        options={"segment": 15, "scope": "segment"},
        bytes_per_row=lambda d: crtn_bytes(d, 5, 15),
        models=("sequence_classifier",),
        exempt={"learns": "the first sequence of a row has no region to choose among"},
    ),
    "compressive": detached_relative(
        options={"length": 4, "compressed": 3, "rate": 2},
        bytes_per_row=lambda d: (4 + 1 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
        cost=Cost({"length": M, "compressed": 6, "rate": 2}, lambda: LAYERS * (window(M + 1 + 6) + D * D), RELATIVE),
    ),
    "compressive/kv": detached_relative(
        options={"length": 4, "compressed": 3, "rate": 2, "keep": "kv"},
        bytes_per_row=lambda d: (4 + 1 + 3) * (4 * d + 8) + 16,
        exact={"length": 64, "keep": "kv"},
        cost=Cost(
            {"length": M, "compressed": 6, "rate": 2, "keep": "kv"},
            lambda: LAYERS * (window(M + 1 + 6) - 2 * D * D * 6 / N + 2 * D * D / 2 + D * D),
            RELATIVE,
        ),
    ),
    "compressive/dilated": detached(
        options={
            **{"length": 2, "compressed": 3, "rate": 3, "function": "dilated"},
            **{"loss": "autoencoding", "positions": "age", "relative": False},
        },
        bytes_per_row=lambda d: (2 + 2 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
    ),
    "compressive/most_used": detached(
        options={"length": 4, "compressed": 3, "rate": 3, "function": "most_used", "relative": False},
        bytes_per_row=lambda d: (4 + 2 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
    ),
    "feedback": Contract(
        options={"length": 4},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        exact={"length": 4},
        exempt=FEEDBACK,
        cost=Cost(
            {"length": M},
            lambda: LAYERS * (3 * M * D - 2 * N * D - 2 * D * D) + 2 * D * D * (1 + M / N) + 2 * D * D / (B * N),
        ),
    ),
    "feedback/separate": Contract(
        options={"length": 4, "shared_kv": False, "positions": "relative", "start": "zeros"},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        exact={"length": 4},
        exempt=FEEDBACK,
        cost=Cost(
            {"length": M, "shared_kv": False},
            lambda: LAYERS * (3 * M * D - 2 * N * D + 2 * D * D * M / N + 2 * D * D / (B * N)),
        ),
    ),
    "feedback/kv": Contract(
        options={"length": 4, "positions": None, "keep": "kv"},
        bytes_per_row=lambda d: 4 * (8 * d + 8) + 8,
        exact={"length": 4},
        exempt=FEEDBACK,
    ),
    "attention_cache": stateless(
        exempt={"remembers": SHARED, "empty": "as grc: a cache of zeros is read and mixed like any other"},
        image_cost=ImageCost({}, READ + 4 * TOKENS * C * C + 4 * TOKENS * TOKENS * C + 5 * ONCE, READ),
    ),
    "attention_cache/store": stateless(
        options={"update": "store"},
        exempt={"remembers": SHARED, "empty": "as attention_cache"},
        image_cost=ImageCost({"update": "store"}, READ + 2 * ONCE, READ),
    ),
    "read_twice": Contract(
        options={"slots": 4},
        bytes_per_row=lambda d: 4 * (4 * d + 16) + 16,
        cost=Cost({"slots": M}, lambda: LAYERS * side(M) + D),
    ),
    "read_twice/joint": Contract(
        options={"slots": 4, "attention": "joint", "summary": "mean", "every": 4, "after": "tanh"},
        bytes_per_row=lambda d: 4 * (4 * d + 16) + 16,
    ),
    "read_twice/side": Contract(
        options={"slots": 4, "summary": "ends", "every": 4, "after": "place", "top_k": 3, "clip": 2, "layer": 1},
        bytes_per_row=lambda d: 4 * (4 * d + 16) + 16,
    ),
    "outside_infini": Contract(bytes_per_row=lambda d: 4 * (d * d // 2 + d) + 8),
}
