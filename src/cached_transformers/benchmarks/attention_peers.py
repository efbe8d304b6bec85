"""Published implementations of attention mechanisms, from PyPI: what ours are timed beside.

Each is optional, and is installed by `make test-peers` or `pip install cached-transformers[peers]`. All are given the
same queries, keys and values where they take them, and else the layer's input and projections of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Called = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Peer:
    """A published implementation: its name on PyPI, its module, and what builds it.

    `build(length, heads, head_width, device)` gives a function of {"q", "k", "v", "x"} with a differentiable result.
    """

    distribution: str
    module: str
    build: Callable[[int, int, int, str], Called]


def _performer(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("performer_pytorch")
    attention = library.FastAttention(dim_heads=width, nb_features=256, causal=False).to(device)
    return lambda t: attention(t["q"], t["k"], t["v"])


def _reformer(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("reformer_pytorch.reformer_pytorch")
    attention = library.LSHAttention(bucket_size=64, n_hashes=1, causal=False, dropout=0.0).to(device)
    return lambda t: attention(t["q"].flatten(0, 1), t["v"].flatten(0, 1))[0]


def _routing(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("routing_transformer.routing_transformer")
    clusters = max(1, round(length**0.5))
    attention = library.KmeansAttention(
        num_clusters=clusters, window_size=-(-length // clusters), num_heads=heads, head_dim=width, num_mem_kv=0
    ).to(device)
    return lambda t: attention(t["q"], t["k"], t["v"])[0]


def _image(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("local_attention")
    attention = library.LocalAttention(
        window_size=256, look_backward=1, causal=True, exact_windowsize=False, use_rotary_pos_emb=False
    ).to(device)
    return lambda t: attention(t["q"], t["k"], t["v"])


def _linformer(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("linformer")
    layer = library.LinformerSelfAttention(heads * width, length, k=256, heads=heads).to(device)
    return lambda t: layer(t["x"])


def _axial(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("axial_attention")
    layer = library.AxialAttention(dim=heads * width, num_dimensions=2, heads=heads, dim_index=-1).to(device)
    side = round(length**0.5)
    return lambda t: layer(t["x"][:, : side * side].unflatten(1, (side, side)))


PEERS: dict[str, Peer] = {
    "axial": Peer("axial-attention", "axial_attention", _axial),
    "image_transformer": Peer("local-attention", "local_attention", _image),
    "linformer": Peer("linformer", "linformer", _linformer),
    "performer": Peer("performer-pytorch", "performer_pytorch", _performer),
    "reformer": Peer("reformer-pytorch", "reformer_pytorch", _reformer),
    "routing": Peer("routing-transformer", "routing_transformer", _routing),
}
"""By name of our mechanism. Those that take the layer's input are timed with projections of their own."""
