"""Patterns and positions by FlexAttention against the plain form: on a GPU; and on the CPU its masks, scores and
blocks, by what it documents of itself as torch operations, and by its own operator without a compiler.
"""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.parts import flex, kernels
from cached_transformers.interfaces.memory import Context
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.models import LanguageModel
from cached_transformers.positions import BucketedPositions, Positions, RelativePositions, make_positions

B, H, E, N = 2, 2, 16, 75
PATTERNS: dict[str, dict[str, Any]] = {
    "all": {"name": "softmax"},
    "window": {"name": "longformer", "window": 12},
    "dilated": {"name": "longformer", "window": 6, "dilation": (1, 3)},
    "global": {"name": "longformer", "window": 12, "prefix": 2, "global_tokens": (30, 200)},
    "projected": {"name": "longformer", "window": 12, "global_tokens": (30,), "global_projections": True},
    "blocks": {"name": "image_transformer", "block": 16, "memory": 8},
    "class token": {"name": "image_transformer", "block": 16, "memory": 20, "prefix": 1},
    "map": {"name": "image_transformer", "block": (4, 3), "memory": (2, 3), "size": (10, 8), "prefix": 1},
    "map of blocks": {
        "name": "image_transformer",
        "block": (4, 3),
        "memory": (2, 3),
        "size": (10, 8),
        "order": "blocks",
    },
    "strided": {"name": "sparse_transformer", "stride": 20},
    "fixed": {"name": "sparse_transformer", "stride": 9, "pattern": "fixed", "summary": 2, "slices": 2, "prefix": 2},
    "by heads": {"name": "sparse_transformer", "stride": 9, "pattern": "fixed", "summary": 2, "combine": "heads"},
    "far": {"name": "sparse_transformer", "stride": 20, "combine": "layers", "index": 1},
    "row": {"name": "axial", "mode": "row", "columns": 10, "prefix": 1},
    "column": {"name": "axial", "mode": "col", "columns": 10, "prefix": 1},
    "random": {"name": "bigbird", "block": 6, "random": 1},
    "random, large": {"name": "bigbird", "block": 10, "random": 1, "window": 1},
}
COMPILED, WHOLE_BLOCK = flex.compiled_flex, flex.BLOCK
SCHEMES = ("relative", "clamped", "alibi", "bucketed")


def documented(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any = None, block_mask: Any, return_lse: bool = False
) -> Any:
    """What FlexAttention says of itself, over all pairs; of blocks that the mask leaves out it computes nothing."""
    near = block_mask.to_dense().bool().repeat_interleave(flex.BLOCK, -2).repeat_interleave(flex.BLOCK, -1)
    assert near.shape[2:] == (q.shape[2], k.shape[2])
    at = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
    logits = q @ k.mT / q.shape[-1] ** 0.5
    logits = logits if score_mod is None else score_mod(logits, *at)
    logits = logits.masked_fill(~(near & block_mask.mask_mod(*at)), -torch.inf)
    seen = (logits > -torch.inf).any(-1, keepdim=True)
    out = torch.where(seen, logits, 0).softmax(-1).where(seen, 0) @ v
    return (out, torch.where(seen, logits, 0).logsumexp(-1).where(seen[..., 0], -torch.inf)) if return_lse else out


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention as it documents itself, in small blocks, wherever it runs."""
    monkeypatch.setattr(flex, "compiled_flex", lambda: documented)
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(kernels, "_flex_lacks", lambda *call: None)
    flex.shown.cache_clear()
    yield
    flex.shown.cache_clear()


@pytest.fixture
def its_own(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FlexAttention itself; where it makes all pairs it has a gradient on the CPU, and only refuses to be asked."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *given: None, raising=False)
    monkeypatch.setattr(flex, "compiled_flex", lambda: module.flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield module
    torch.compiler.reset()


def core(spec: dict[str, Any], kernel: str) -> Any:
    torch.manual_seed(0)
    return create_attention({**spec, "kernel": kernel}, width=H * E, heads=H, length=300, depth=1).eval()


def inputs(tokens: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(B, H, tokens, E, generator=generator, device="cpu").to(device).requires_grad_() for _ in range(3)
    ]


def memory(device: str = "cpu") -> Context:
    """Slots of which some are empty, others in each row."""
    keys, values = torch.randn(2, B, H, 11, E, generator=torch.Generator().manual_seed(0)).to(device)
    valid_BM = torch.arange(11, device=device) >= torch.tensor([4, 0], device=device)[:, None]
    return Context(keys, values, torch.zeros(B, 11, 1, device=device), valid_BM)


def results(spec: dict[str, Any], kernel: str, tokens: int, device: str = "cpu", **call: Any) -> list[Tensor]:
    """Values and log-sum-exps of what is no padding, and gradients of all."""
    given = inputs(tokens, device)
    x_BND = torch.ones(B, tokens, H * E, device=device)
    out, lse = core(spec, kernel).to(device)(*given, x_BND=x_BND, want_lse=True, **call)[:2]
    if call.get("key_padding_mask") is not None:
        hidden_B1N = call["key_padding_mask"][:, None]
        out, lse = out.masked_fill(hidden_B1N[..., None], 0), lse.masked_fill(hidden_B1N, 0)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.clamp(min=-100).sum(), given)]


def agree(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_that_of_the_plain_form(name: str, causal: bool) -> None:
    padding = torch.arange(N) >= torch.tensor([N - 2, N - 30])[:, None]
    for mask, context in ((None, None), (padding, memory())):
        call = {"causal": causal, "key_padding_mask": mask, "context": context}
        agree(*(results(PATTERNS[name], kernel, N, **call) for kernel in ("flex", "plain")))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ["window", "random"])
def test_rows_of_padding_alone_and_sequences_shorter_than_a_block(name: str) -> None:
    padding = torch.tensor([[False], [True]]).expand(B, 40)
    agree(*(results(PATTERNS[name], kernel, 40, key_padding_mask=padding) for kernel in ("flex", "plain")))
    got, want = (
        core(PATTERNS[name], kernel)(*inputs(40), key_padding_mask=padding, want_lse=True)
        for kernel in ("flex", "plain")
    )
    assert (got.out_BHNV[1] == 0).all() and torch.equal(got.lse_BHN[1], want.lse_BHN[1])
    agree(*(results(PATTERNS[name], kernel, 3, causal=True) for kernel in ("flex", "plain")))


@pytest.mark.usefixtures("anywhere")
def test_other_queries_than_keys_and_a_bias_of_any_shape() -> None:
    q, k, v = inputs(N)
    for shape in ((1, H, 20, N + 11), (B, 1, 1, N + 11), (1, 1, 20, N + 11)):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        both = []
        for kernel in ("flex", "plain"):
            out = core(PATTERNS["all"], kernel)(q[:, :, :20], k, v, context=memory(), bias_BHNM=bias).out_BHNV
            both.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v, bias])])
        agree(*both)


@pytest.mark.usefixtures("anywhere")
def test_blocks_are_found_once_for_a_rule_and_its_lengths_and_hold_nothing_in_vain() -> None:
    for _ in range(2):
        for padding in (None, torch.rand(B, N) < 0.2):
            core(PATTERNS["window"], "flex")(*inputs(N), key_padding_mask=padding, context=memory())
    assert flex.shown.cache_info()[:2] == (3, 1)  # hits, misses: of equal cores, whatever the call's tensors hold
    blocks_QK = flex.shown(core(PATTERNS["window"], "flex").rule(H, N, False), lengths()).blocks.to_dense()[0, 0]
    i, j = torch.arange(80)[:, None], torch.arange(80)
    near = ((i - j).abs() <= 6) & (i < N) & (j < N)
    assert torch.equal(blocks_QK.bool(), near.view(5, 16, 5, 16).any(3).any(1))
    with torch.inference_mode():
        core(PATTERNS["global"], "flex")(*inputs(N))
    results(PATTERNS["global"], "flex", N)  # what was kept then serves training
    assert pickle.loads(pickle.dumps(core(PATTERNS["random"], "flex"))).kernel == "flex"


def lengths() -> flex.Lengths:
    return flex.Lengths(H, N, 0, N, False, torch.device("cpu"))


@pytest.mark.usefixtures("anywhere")
def test_a_table_of_blocks_of_each_row_leaves_no_pair_out_and_touches_no_block_too_many() -> None:
    seen_BHQQ = torch.rand(B, H, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.1
    for slots in (0, 11):
        what = flex.shown_blocks(seen_BHQQ, 6, lengths()._replace(slots=slots))
        place_M = torch.arange(slots + 78)
        pairs = seen_BHQQ.repeat_interleave(6, 2).repeat_interleave(6, 3)
        pairs = torch.cat([torch.ones(B, H, 78, slots, dtype=torch.bool), pairs], 3)
        want = torch.zeros(B, H, 5, 6, dtype=torch.bool)
        for i in range(5):
            for j in range(6):
                want[:, :, i, j] = pairs[:, :, i * 16 : i * 16 + 16][..., place_M // 16 == j].any(3).any(2)
        assert torch.equal(what.blocks.to_dense().bool(), want[..., : -(-(slots + N) // 16)])


def scheme(name: str) -> Positions:
    torch.manual_seed(3)
    if name == "bucketed":
        return BucketedPositions(H, buckets=8, reach=20, causal=True)
    if name == "clamped":
        return RelativePositions(H, E, clamp=9)
    return make_positions(name, width=H * E, heads=H)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_by_distance_are_those_of_the_bias(name: str) -> None:
    positions, q = scheme(name), inputs(7)[0]
    place_BNP = torch.arange(12)[None, :, None].expand(B, -1, -1)
    bias = positions.bias(q, place_BNP[:, 5:], place_BNP).expand(B, -1, -1, -1)
    distances = positions.by_distance(q, 12)
    assert distances.dim() == 4
    distances = distances.expand(B, H, 7, -1)
    for i in range(7):
        for j in range(5 + i + 1):
            torch.testing.assert_close(bias[:, :, i, j], distances[:, :, i, 5 + i - j])
    assert Positions().by_distance(q, 12) is None


def layer(name: str, kernel: str) -> SelfAttention:
    torch.manual_seed(4)
    return SelfAttention(H * E, H, core=core(PATTERNS["all"], kernel), positions=scheme(name), causal=True)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_of_positions_by_distance_is_that_of_their_bias(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots right before the segment; the kernel gets no bias."""
    x = torch.randn(B, 20, H * E, generator=torch.Generator().manual_seed(5)).requires_grad_()
    place_BNP = torch.arange(30, 50)[None, :, None].expand(B, -1, -1)
    context = memory()._replace(positions_BMP=torch.arange(19, 30)[None, :, None], consecutive=True)
    asked = []
    monkeypatch.setattr(flex, "_look_up", lambda t, *more, was=flex._look_up: asked.append(t.shape) or was(t, *more))
    both = []
    for kernel in ("flex", "plain"):
        attention = layer(name, kernel)
        options: dict[str, Any] = {"consecutive": True, "context": lambda project: context}
        out = attention(x, place_BNP, padding_BN=torch.arange(20) >= torch.tensor([[20], [15]]), **options).y_BND
        out = out[:, :15]
        parameters = [x, *(p for p in attention.parameters())]
        grads = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        both.append([out, *(torch.zeros(()) if grad is None else grad for grad in grads)])
    agree(*both)
    assert len(asked) == 1 and asked[0][3] == 31  # distances alone


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"memory": {"name": "transformer_xl", "length": 12}}, 4),
        ({"memory": {"name": "transformer_xl", "length": 12}, "positions": "rotary"}, 0),
        ({"memory": {"name": "compressive", "length": 8, "compressed": 4, "rate": 2}}, 4),
        ({"memory": "grc_stream", "positions": "alibi"}, 4),
    ],
)
def test_a_model_that_reads_a_stream_is_the_same(
    options: dict[str, Any], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    was = flex._look_up
    monkeypatch.setattr(flex, "_look_up", lambda t, *more: looked_up.append(t.shape) or was(t, *more))
    ids = torch.randint(9, (B, 24), generator=torch.Generator().manual_seed(6))
    both = []
    for kernel in ("flex", "plain"):
        torch.manual_seed(7)
        model = LanguageModel(9, width=32, depth=2, heads=H, attention={"name": "softmax", "kernel": kernel}, **options)
        first = model(ids[:, :12])
        second = model(ids[:, 12:], first.state)
        grads = torch.autograd.grad(second.outputs.square().sum(), list(model.parameters()), allow_unused=True)
        both.append([first.outputs, second.outputs, *(grad for grad in grads if grad is not None)])
    agree(*both, tolerance=1e-4)
    assert len(looked_up) == asked


def test_a_core_that_looks_nothing_up_refuses_logits_by_distance() -> None:
    with pytest.raises(ValueError, match="looks up no logits by distance in this call; give them as a bias"):
        core(PATTERNS["all"], "plain")(*inputs(4), causal=True, distances_BHNK=torch.zeros(1, H, 1, 4))


@pytest.mark.parametrize("name", ["dilated", "map of blocks", "by heads", "random"])
def test_flexattention_itself_takes_the_masks(name: str, its_own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(its_own, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    call = {"causal": True, "key_padding_mask": torch.arange(N) >= torch.tensor([[N], [50]]), "context": memory()}
    got, want = (core(PATTERNS[name], kernel)(*inputs(N), **call).out_BHNV for kernel in ("flex", "plain"))
    shown = ~call["key_padding_mask"][:, None, :, None]
    torch.testing.assert_close(got * shown, want * shown, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("its_own")
def test_flexattention_itself_gives_gradients_of_relative_positions() -> None:
    given = inputs(20)
    distances = torch.randn(B, H, 20, 31, generator=torch.Generator().manual_seed(8)).requires_grad_()
    both = []
    for way in (flex.compiled_flex(), documented):
        attention = core(PATTERNS["all"], "flex")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "compiled_flex", lambda way=way: way)
            out, lse = attention(*given, causal=True, context=memory(), distances_BHNK=distances, want_lse=True)[:2]
        both.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), [*given, distances])])
    agree(*both)


@pytest.mark.slow
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ["all", "dilated", "random"])
def test_flexattention_compiled_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU it has values, in blocks of its own size."""
    monkeypatch.setattr(flex, "BLOCK", WHOLE_BLOCK)
    call: dict[str, Any] = {"causal": True, "context": memory()}
    if name == "all":
        call["distances_BHNK"] = torch.randn(B, H, 300, 311)
    q, k, v = (t.detach() for t in inputs(300))
    want = core(PATTERNS[name], "flex")(q, k, v, **call).out_BHNV
    monkeypatch.setattr(flex, "compiled_flex", COMPILED)
    torch.testing.assert_close(core(PATTERNS[name], "flex")(q, k, v, **call).out_BHNV, want, rtol=0, atol=1e-5)
    torch.compiler.reset()


def test_new_masks_of_a_pattern_need_no_new_compilation(its_own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few for lengths; the compiler gives up after eight."""
    counter = CompileCounter()
    compiled = torch.compile(its_own.flex_attention, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "compiled_flex", lambda: compiled)
    for tokens in (16, 32, 75, 110):
        for padding in (None, torch.rand(B, tokens) < 0.2, torch.rand(B, tokens) < 0.2):
            q, k, v = (t.detach() for t in inputs(tokens))
            core(PATTERNS["dilated"], "flex")(q, k, v, key_padding_mask=padding)
    assert 1 <= counter.frame_count <= 5


@pytest.mark.device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_values_and_gradients_of_patterns_on_a_gpu(name: str, causal: bool, device: str) -> None:
    if device != "cuda":
        pytest.skip("FlexAttention runs on a GPU")
    call = {"causal": causal, "context": memory(device)}
    flexible, auto, plain = (
        results(PATTERNS[name], kernel, 300, device, **call) for kernel in ("flex", "auto", "plain")
    )
    agree(flexible, plain, 1e-3)
    agree(auto, plain, 1e-3)
    torch.compiler.reset()


@pytest.mark.device
@pytest.mark.parametrize("name", SCHEMES)
def test_positions_by_distance_on_a_gpu(name: str, device: str) -> None:
    if device != "cuda":
        pytest.skip("FlexAttention runs on a GPU")
    both = []
    for kernel in ("flex", "plain"):
        attention = layer(name, kernel).to(device)
        x = torch.ones(B, 200, H * E, device=device).cumsum(1).sin().requires_grad_()
        out = attention(x, torch.arange(200, device=device)[None, :, None].expand(B, -1, -1), consecutive=True).y_BND
        grads = torch.autograd.grad(out.square().sum(), [x, *attention.parameters()], allow_unused=True)
        both.append([out, *(grad for grad in grads if grad is not None)])
    agree(*both, tolerance=1e-3)
    torch.compiler.reset()


@pytest.mark.parametrize("positions", ["learned", "relative", None])
def test_tokens_that_attend_a_memory_alone_look_their_positions_up(positions: str | None, anywhere: None) -> None:
    """The Feedback Transformer's own attention over its keys knows biases alone, and leaves the rest to the core."""
    results = []
    for kernel in ("plain", "flex"):
        torch.manual_seed(0)
        memory = {"name": "feedback", "length": 5, "positions": positions}
        model = LanguageModel(11, 32, 2, 2, 16, memory=memory, attention={"name": "softmax", "kernel": kernel}).double()
        tokens, state = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0)), None
        for piece in tokens.split(5, 1):
            out = model(piece, state)
            state = out.state
        out.outputs.square().sum().backward()
        results.append([out.outputs, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)
