"""Attentions against packages of the Python index that compute the same; `make test-peers` installs these."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs
from attentions.cases import B, E, H
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.axial import AxialAttention
from cached_transformers.attentions.image_transformer import ImageTransformerAttention
from cached_transformers.attentions.linear import LinearAttention
from cached_transformers.attentions.longformer import LongformerAttention
from cached_transformers.attentions.performer import PerformerAttention
from cached_transformers.attentions.reformer import ReformerAttention
from cached_transformers.attentions.routing import RoutingAttention
from cached_transformers.attentions.sinkhorn import SinkhornAttention, balance

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("size", [(3, 5), (1, 13), (13, 1), (4, 4)])
def test_the_sum_of_both_axes(size: tuple[int, int], common: bool) -> None:
    """With projections of each axis, and with projections in common, which mode="sum" has."""
    package = pytest.importorskip("axial_attention")
    torch.manual_seed(0)
    peer = package.AxialAttention(12, num_dimensions=2, dim_index=-1, heads=2, sum_axial_out=True).double()
    first, second = (axis.fn for axis in peer.axial_attentions)
    if common:
        first.to_out.bias.data.zero_()
        second.load_state_dict(first.state_dict())
    x = torch.randn(2, *size, 12, dtype=torch.double)
    got = torch.zeros_like(x)
    for mode, own in (("sum", first),) if common else (("col", first), ("row", second)):
        made = [own.to_q(x), *own.to_kv(x).chunk(2, -1)]
        sources = [t.flatten(1, 2).unflatten(-1, (2, 6)).transpose(1, 2) for t in made]
        out = AxialAttention(mode=mode, size=size)(*sources).out_BHNV
        got = got + own.to_out(out.transpose(1, 2).flatten(2)).unflatten(1, size)
    torch.testing.assert_close(got, peer(x), rtol=0, atol=1e-12)


def windows_of(**options: Any) -> Any:
    package = pytest.importorskip("local_attention")
    return package.LocalAttention(causal=True, use_rotary_pos_emb=False, autopad=True, **options).eval()


@pytest.mark.parametrize("tokens", [7, 16, 29])
@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_that_look_back(tokens: int, back: int, padded: bool) -> None:
    q, k, v = (t.detach() for t in inputs(tokens, values=6))
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, -2:] = padded
    want = windows_of(window_size=4, look_backward=back, look_forward=0, exact_windowsize=False)(q, k, v, mask=~padding)
    got = ImageTransformerAttention(block=4, memory=4 * back)(q, k, v, causal=True, key_padding_mask=padding).out_BHNV
    there = ~padding[:, None, :, None]
    torch.testing.assert_close(got * there, want * there, rtol=0, atol=1e-6)


@pytest.mark.parametrize("back", [1, 2])
def test_its_exact_windows_are_those_of_longformer(back: int) -> None:
    q, k, v = (t.detach() for t in inputs(29, values=6))
    want = windows_of(window_size=4, look_backward=back, look_forward=0, exact_windowsize=True)(q, k, v)
    got = LongformerAttention(window=4 * back)(q, k, v, causal=True).out_BHNV
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tokens", [24, 9])
def test_linformer_computes_the_same(share: bool, tokens: int) -> None:
    linformer = pytest.importorskip("linformer.linformer")
    peer = linformer.LinformerSelfAttention(12, 24, k=4, heads=2, share_kv=share).double().eval()
    options = {"name": "linformer", "slots": 4, "sharing": "keys_values" if share else "heads"}
    core = create_attention(options, heads=2, length=24).double().eval()
    projections = [peer.proj_k] if share else [peer.proj_k, peer.proj_v]
    core.projection_PGLS.data.copy_(torch.stack(projections)[:, None])
    x = torch.randn(2, tokens, 12, dtype=torch.double, requires_grad=True)
    to_v = peer.to_k if share else peer.to_v  # it shares the projection of features with that of places
    q, k, v = (f(x).unflatten(-1, (2, 6)).transpose(1, 2) for f in (peer.to_q, peer.to_k, to_v))
    got = peer.to_out(core(q, k, v).out_BHNV.transpose(1, 2).flatten(2))
    agree(got, peer(x), [x, *peer.to_q.parameters(), *peer.to_k.parameters()])


RATE, WIDTH, HEADS = 3, 12, 2


def compressed_by(causal: bool = False) -> torch.nn.Module:
    package = pytest.importorskip("memory_compressed_attention")
    module = (
        package.MemoryCompressedAttention(WIDTH, heads=HEADS, causal=causal, compression_factor=RATE).double().eval()
    )
    for null in (module.null_k, module.null_v):
        torch.nn.init.normal_(null)
    assert isinstance(module, torch.nn.Module)
    return module


@pytest.mark.parametrize("causal", [False, True])
def test_memory_compressed_computes_the_same_but_for_its_scale(causal: bool) -> None:
    """It divides logits by the root of the model's width, not of a head's; one convolution serves keys and values."""
    theirs = compressed_by(causal)
    core = create_attention(
        {"name": "memory_compressed", "null": True, "rate": RATE}, width=WIDTH, heads=HEADS
    ).double()
    conv = theirs.compress_fn.conv
    for compression in (core.keys, core.values):
        compression.weight_GFO.data.copy_(conv.weight.view(HEADS, 6, 6, RATE).permute(0, 3, 2, 1).flatten(1, 2))
        compression.bias_GO.data.copy_(conv.bias.view(HEADS, 6))
    core.null_HE.data.copy_(theirs.null_k.view(HEADS, 6))
    core.null_HV.data.copy_(theirs.null_v.view(HEADS, 6))
    x = torch.randn(2, 12, WIDTH, dtype=torch.double, requires_grad=True)
    q, k, v = (t.unflatten(-1, (HEADS, 6)).transpose(1, 2) for t in theirs.to_qkv(x).chunk(3, -1))
    out = core(q * math.sqrt(6 / WIDTH), k, v, causal=causal).out_BHNV
    agree(theirs.to_out(out.transpose(1, 2).flatten(2)), theirs(x), [x, *theirs.to_qkv.parameters()])


def both_performers(
    *, kernel: str, causal: bool, width: int = 16, count: int = 24
) -> tuple[PerformerAttention, torch.nn.Module]:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    core = PerformerAttention(2 * width, 2, features=count, kernel=kernel, chunk=8)  # type: ignore[arg-type]
    other = peer.FastAttention(width, count, causal=causal, generalized_attention=kernel == "relu")
    core.directions_FE.copy_(other.projection_matrix)
    return core.double(), other.double()


def test_generalised_attention_is_the_same() -> None:
    for causal in (False, True):
        core, other = both_performers(kernel="relu", causal=causal)
        q, k, v = torch.randn(3, 2, 2, 128, 16).double()
        want = other(q, k, v)
        # Its causal form adds 1e-6 to the sum of the keys.
        torch.testing.assert_close(core(q, k, v, causal=causal).out_BHNV, want, rtol=0, atol=1e-5 if causal else 1e-10)


def test_sums_of_linear_attention_over_all_keys_and_over_those_so_far_are_the_same() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    q, k, v = torch.randn(3, 2, 2, 130, 16).double()
    features = F.elu(q) + 1, F.elu(k) + 1
    core = LinearAttention(chunk=32)
    torch.testing.assert_close(core(q, k, v).out_BHNV, peer.linear_attention(*features, v), rtol=0, atol=1e-12)
    # Its causal form adds 1e-6 to the sum of the keys.
    want = peer.causal_linear_attention_noncuda(*features, v)
    torch.testing.assert_close(core(q, k, v, causal=True).out_BHNV, want, rtol=0, atol=2e-5)


def test_with_nothing_added_its_features_give_the_same_attention() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    core, _ = both_performers(kernel="softmax", causal=False)
    q, k, v = torch.randn(3, 2, 2, 40, 16).double()
    w = core.directions_FE
    phi_q = peer.softmax_kernel(q, projection_matrix=w, is_query=True, eps=0.0)
    phi_k = peer.softmax_kernel(k, projection_matrix=w, is_query=False, eps=0.0)
    want = peer.linear_attention(phi_q, phi_k, v)
    torch.testing.assert_close(core(q, k, v).out_BHNV, want, rtol=0, atol=1e-10)


TOKENS, CHUNK = 32, 4


@pytest.mark.parametrize("causal", [False, True])
def test_one_round_of_reformer_is_theirs(causal: bool) -> None:
    """With the same rotations: theirs are those of all heads, in the order (E, R, buckets / 2)."""
    peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")
    q, v = torch.randn(2, B, H, TOKENS, E, generator=torch.Generator().manual_seed(1)).unbind()
    core = ReformerAttention(H * E, H, CHUNK, 1, buckets=TOKENS // CHUNK, allow_leak=True).eval()
    torch.manual_seed(5)
    core.rotations.copy_(torch.randn(1, E, 1, TOKENS // CHUNK // 2))
    torch.manual_seed(5)
    theirs = peer.LSHAttention(bucket_size=CHUNK, n_hashes=1, causal=causal).eval()
    want = theirs(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2])
    torch.testing.assert_close(core(q, q, v, causal=causal).out_BHNV, want, rtol=0, atol=2e-6)


ROUTED = 24


def tokens_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, B, H, ROUTED, E, generator=torch.Generator().manual_seed(seed)).unbind()


@pytest.mark.parametrize(("clusters", "window"), [(1, ROUTED), (4, 6), (3, 11)])
def test_attention_within_clusters_is_theirs(clusters: int, window: int) -> None:
    peer = pytest.importorskip("routing_transformer.routing_transformer")
    theirs = peer.KmeansAttention(clusters, window, H, E, num_mem_kv=0).eval()
    ours = RoutingAttention(H * E, H, clusters, window, combine="mean").eval()
    theirs.kmeans.means.copy_(ours.centroids_HCE)
    theirs.kmeans.initted.fill_(True)
    want, _ = theirs(*tokens_of(1))
    # They divide by the number of clusters plus 1e-5.
    torch.testing.assert_close(ours(*tokens_of(1)).out_BHNV, want, rtol=2e-5, atol=1e-6)
    q, k, v = tokens_of(1)
    padding = torch.zeros(B, ROUTED, dtype=torch.bool)
    padding[0, 15:] = True
    if clusters > 1:
        # They let padding stand among the nearest, so that fewer real tokens are chosen.
        theirs_padded, _ = theirs(q, k, v, query_mask=~padding)
        theirs_trimmed, _ = theirs(q[:1, :, :15], k[:1, :, :15], v[:1, :, :15])
        assert (theirs_padded[:1, :, :15] - theirs_trimmed).abs().max() > 0.1


BLOCK, SORTED = 4, 16


def sides_of(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(2, B, H, SORTED, E, generator=torch.Generator().manual_seed(seed)).unbind()


def test_balancing_is_theirs_with_sides_exchanged() -> None:
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    scores = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
    want = peer.sinkhorn_sorting_operator(scores.mT, 7).mT
    ours = balance(scores[:, None], torch.ones(5, 5, dtype=torch.bool), 7, causal=False)[:, 0]
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-6)


def test_attention_with_a_given_matrix_is_theirs_where_values_are_the_keys() -> None:
    """Their sorted values are taken from the keys, so that both agree only where these are the same."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    theirs = peer.SinkhornAttention(BLOCK, H * E, E, H, SORTED).eval()
    ours = SinkhornAttention(H * E, H, BLOCK, own_block=True).eval()
    r = torch.rand(B, H, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    theirs.sort_net.forward = lambda q, k, topk: r.flatten(0, 1)
    ours._permutation = lambda *_: r  # type: ignore[method-assign]
    q, k = sides_of()
    torch.testing.assert_close(ours(q, k, k).out_BHNV, theirs(q, k, k), rtol=0, atol=1e-6)
    v = sides_of(2)[0]
    assert (ours(q, k, v).out_BHNV - theirs(q, k, v)).abs().max() > 0.1
    changed = v.clone()
    changed[:, :, BLOCK:] += 1
    assert (ours(q, k, v).out_BHNV - ours(q, k, changed).out_BHNV)[:, :, :BLOCK].abs().max() > 0.1
    torch.testing.assert_close(theirs(q, k, v)[:, :, :BLOCK], theirs(q, k, changed)[:, :, :BLOCK], rtol=0, atol=0)
