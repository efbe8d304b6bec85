"""Published implementations of attention mechanisms, from PyPI.

Each is optional; install them by `make test-peers` or `pip install cached-transformers[peers]`. All get the same
queries, keys and values if they take them; a layer that projects its input is compared with ours with projections.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Called = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class AttentionPeer:
    """A published implementation.

    `build(length, heads, head_width, device)` returns a function of {"q", "k", "v", "x"} with a differentiable result.

    Attributes:
        distribution, module: its names on PyPI and on import.
        options: of our mechanism, if they must differ from its paper's to compute the same.
        causal: both take their causal form.
        projects: the peer is a layer that projects its input to queries, keys and values, and its output.
    """

    distribution: str
    module: str
    build: Callable[[int, int, int, str], Called]
    options: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = False
    projects: bool = False


def _performer(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("performer_pytorch")
    attention = library.FastAttention(dim_heads=width, nb_features=256, causal=False).to(device)
    return lambda t: attention(t["q"], t["k"], t["v"])


def _reformer(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("reformer_pytorch.reformer_pytorch")
    attention = library.LSHAttention(bucket_size=64, n_hashes=2, causal=False, dropout=0.0).to(device)
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
    layer = library.LinformerSelfAttention(heads * width, length, k=128, heads=heads).to(device)
    return lambda t: layer(t["x"])


def _axial(length: int, heads: int, width: int, device: str) -> Called:
    library = importlib.import_module("axial_attention")
    layer = library.AxialAttention(dim=heads * width, num_dimensions=2, heads=heads, dim_index=-1).to(device)
    side = round(length**0.5)
    return lambda t: layer(t["x"][:, : side * side].unflatten(1, (side, side)))


def _fla_reference(folder: str) -> Any:
    """Load the PyTorch reference functions of one mechanism of flash-linear-attention.

    The file is loaded by its path, because importing the package needs Triton, and so a GPU.
    """
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'fla'", name="fla_core")
    path = Path(package.origin).parent / "ops" / folder / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{folder}_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _gated_delta(length: int, heads: int, width: int, device: str) -> Called:
    rule = _fla_reference("gated_delta_rule").naive_chunk_gated_delta_rule
    gates = nn.Linear(heads * width, 2 * heads, bias=False).to(device)  # as our mechanism has

    def run(t: Mapping[str, Tensor]) -> Tensor:
        share, decay = gates(t["x"]).chunk(2, -1)
        q, k = (F.normalize(F.silu(t[name]), dim=-1).transpose(1, 2) for name in "qk")
        return rule(q, k, t["v"].transpose(1, 2), -F.softplus(decay), share.sigmoid())[0]  # type: ignore[no-any-return]

    return run


PEERS: dict[str, AttentionPeer] = {
    "axial": AttentionPeer("axial-attention", "axial_attention", _axial, projects=True),
    "gated_delta": AttentionPeer("fla-core", "fla", _gated_delta, causal=True),
    "image_transformer": AttentionPeer("local-attention", "local_attention", _image, causal=True),
    "linformer": AttentionPeer("linformer", "linformer", _linformer, {"sharing": "heads"}, projects=True),
    "performer": AttentionPeer("performer-pytorch", "performer_pytorch", _performer),
    "reformer": AttentionPeer("reformer-pytorch", "reformer_pytorch", _reformer),
    "routing": AttentionPeer("routing-transformer", "routing_transformer", _routing, {"combine": "mean"}),
}
"""By the name of our mechanism."""
