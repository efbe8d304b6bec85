"""The parts of `cached benchmark all`: which work is timed in which forms, at sizes for one card, or tiny.

Parts give their groups one by one, the most telling first, and build nothing before it is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers.registry import ATTENTIONS

from . import attentions, generation, memories, peers, vision
from .attention_peers import PEERS as ATTENTION_PEERS
from .generation_peers import PEERS as WRITERS
from .groups import Call, Case, Group, Unavailable
from .interleaved import precision, training_step

Part = Callable[[str, bool], Iterator[Group]]
"""Groups of a device; tiny ones where the second argument is True."""
Inputs = Callable[[], dict[str, Tensor]]
DTYPES = (torch.bfloat16, torch.float32)
EXACT, EXACT_CAUSAL, LINEAR, DELTA = "SDPA", "SDPA, causal", "linear, causal", "delta_net of silu, causal"
PATTERNS = ("longformer", "image_transformer", "sparse_transformer", "axial", "bigbird")
KERNELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{f"{name} by FlexAttention": (name, False, {"kernel": "flex"}) for name in PATTERNS},
    f"{LINEAR} by fla": ("linear", True, {"kernel": "fla"}),
    f"{DELTA} by fla": ("delta_net", True, {"kernel": "fla", "features": "silu"}),
}
"""Ours through kernels of others, each beside its plain form."""
WINDOW = 512
MODELS = ("ViT-S", "PVT-Tiny", "Swin-T")
LANGUAGE = (None, *generation.STANDARD)
QUICK_MODELS = {"PVTv2-B0": "pvt_v2_b0"}
BY_TOKENS = frozenset({"feedback"})
"""Memories that go through a segment token by token: timed on a short text by themselves."""


def attention_part(device: str, quick: bool) -> Iterator[Group]:
    """Every core, forward and backward, beside SDPA, FlexAttention and published kernels."""
    length, rows = (64, 1) if quick else (4096, 4)
    window = min(WINDOW, length // 2)
    for dtype in DTYPES:
        inputs = functools.partial(attentions.inputs, length, device, dtype, rows)
        core = functools.partial(_core, inputs=inputs, length=length, device=device, dtype=dtype)
        exact = functools.partial(core, attentions.EXACT)
        cases = {EXACT: Case(functools.partial(exact, False)), EXACT_CAUSAL: Case(functools.partial(exact, True))}
        for name in ATTENTIONS.names():
            if name != attentions.EXACT and length <= attentions.LONGEST.get(name, length):
                kind: Any = ATTENTIONS.entry(name).factory
                causal = "bidirectional" not in kind.can
                cases[f"{name}, causal" if causal else name] = Case(functools.partial(core, name, causal))
        cases[LINEAR] = Case(functools.partial(core, "linear", True))
        cases[DELTA] = Case(functools.partial(core, "delta_net", True, features="silu"))
        for title, (name, causal, options) in KERNELS.items():
            kernel = functools.partial(core, name, causal, **options)
            cases[title] = Case(
                functools.partial(_by_kernel, kernel, options["kernel"], device), title.split(" by ")[0]
            )
        cases["fla's linear, causal"] = Case(functools.partial(_fla_linear, inputs, device), LINEAR)
        if dtype != torch.float32:  # which it does not take
            cases["fla's delta rule, causal"] = Case(functools.partial(_fla_delta, inputs, device), DELTA)
        flex = functools.partial(_flex, inputs, length, device, window)
        cases[f"FlexAttention, window of {window}"] = Case(flex, None)
        if dtype == torch.float32:
            for peer in ATTENTION_PEERS.values():
                make = functools.partial(_attention_peer, peer, inputs, length, device)
                cases[_of_others(peer.distribution)] = Case(make)
        yield Group("attentions", f"{rows} rows of {length} tokens, forward and backward", dtype, cases)


def _of_others(distribution: str) -> str:
    """Some peers are called what ours are."""
    return f"{distribution} of others"


def _core(
    name: str, causal: bool, *, inputs: Inputs, length: int, device: str, dtype: torch.dtype, **options: Any
) -> Call:
    return attentions.step_of(attentions.build(name, length, device, dtype, **options), inputs(), causal)


def _by_kernel(make: Callable[[], Call], kernel: str, device: str) -> Call:
    if device != "cuda":
        raise Unavailable("kernels need a GPU")
    if kernel == "fla":
        _fla(device)
    return make()


def _flex(inputs: Inputs, length: int, device: str, window: int) -> Call:
    if device != "cuda":
        raise Unavailable("FlexAttention has a backward pass on GPUs alone")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(
        lambda b, h, i, j: (i - j).abs() <= window // 2, None, None, length, length, device=device
    )
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return _step(inputs(), lambda t: compiled(t["q"], t["k"], t["v"], block_mask=mask))


def _fla(device: str) -> Any:
    if device != "cuda" or importlib.util.find_spec("fla") is None:
        raise Unavailable("flash-linear-attention (fla) is not installed" if device == "cuda" else "fla needs a GPU")
    return importlib.import_module("fla.ops")


def _fla_linear(inputs: Inputs, device: str) -> Call:
    kernel = _fla(device).chunk_linear_attn

    def run(t: dict[str, Tensor]) -> Tensor:
        q, k = (F.elu(t[name]) + 1 for name in "qk")
        out: Tensor = kernel(*(x.transpose(1, 2).contiguous() for x in (q, k, t["v"])), normalize=True)[0]
        return out

    return _step(inputs(), run)


def _fla_delta(inputs: Inputs, device: str) -> Call:
    kernel = _fla(device).chunk_delta_rule

    def run(t: dict[str, Tensor]) -> Tensor:
        q, k = (F.normalize(F.silu(t[name]), dim=-1) for name in "qk")
        beta = torch.sigmoid(t["x"][..., : attentions.HEADS])
        out: Tensor = kernel(*(x.transpose(1, 2).contiguous() for x in (q, k, t["v"])), beta)[0]
        return out

    return _step(inputs(), run)


def _attention_peer(peer: Any, inputs: Inputs, length: int, device: str) -> Call:
    if importlib.util.find_spec(peer.module) is None:
        raise Unavailable(f"{peer.distribution} is not installed")
    return _step(inputs(), peer.build(length, attentions.HEADS, attentions.HEAD_WIDTH, device))


def _step(given: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Tensor]) -> Call:
    def step() -> None:
        run(given).sum().backward()
        for t in given.values():
            t.grad = None

    return step


def memory_part(device: str, quick: bool) -> Iterator[Group]:
    """A training step of every stream memory as a language model, beside the model without and published ones."""
    whole, names = _language_sizes(quick), stream_memories()
    short = dataclasses.replace(whole, segment=min(whole.segment, 64), segments=1)
    groups = [(dtype, whole, [n for n in names if n not in BY_TOKENS]) for dtype in DTYPES]
    for dtype, sizes, chosen in [*groups, (torch.bfloat16, short, [n for n in names if n in BY_TOKENS])]:
        cases = {"no memory": Case(functools.partial(_training, None, sizes, device, dtype, False))}
        for name in chosen:
            cases[name] = Case(functools.partial(_training, name, sizes, device, dtype, False))
            if name in peers.PEERS:
                peer = functools.partial(_memory_peer, name, sizes, device, dtype)
                cases[_of_others(peers.PEERS[name].distribution)] = Case(peer)
        yield Group("memories", _language_work(sizes), dtype, cases)


def _language_sizes(quick: bool) -> peers.Sizes:
    if quick:
        return peers.Sizes(vocabulary=16, width=16, depth=1, heads=2, segment=8, segments=2, rows=1, memory=8, tokens=2)
    return peers.Sizes(vocabulary=8192, width=1024, depth=8, heads=16, segment=512, rows=8, memory=512)


def _language_work(sizes: peers.Sizes) -> str:
    return f"training step, {sizes.rows} rows of {sizes.segments} x {sizes.segment} tokens, width {sizes.width}"


def _training(memory: str | None, sizes: peers.Sizes, device: str, dtype: torch.dtype, compiled: bool) -> Call:
    model = memories.build(None if memory is None else memories.spec(memory, sizes), sizes).to(device)
    called: Any = torch.compile(model) if compiled else model
    bptt = sizes.segments if memory in memories.ACROSS else 1
    return memories.our_step(called, sizes, peers.random_tokens(sizes).to(device), bptt, dtype)


def _memory_peer(name: str, sizes: peers.Sizes, device: str, dtype: torch.dtype) -> Call:
    published = peers.PEERS[name]
    try:
        with peers.scratch_folder():
            peer = published.build(sizes)
    except ModuleNotFoundError as error:
        raise Unavailable(peers.lacking(published.distribution, error)) from error
    peer.module.to(device)
    bptt = sizes.segments if name in memories.ACROSS else 1
    return memories.peer_step(peer, sizes, peers.random_tokens(sizes).to(device), bptt, dtype)


def vision_part(device: str, quick: bool) -> Iterator[Group]:
    """Image models with GRC beside the plain ones: a training step, and inference with folded caches."""
    side, batch = (32, 1) if quick else (224, 64)
    for name in QUICK_MODELS if quick else MODELS:
        for dtype in DTYPES:
            for work in ("training step", "inference"):
                cases = {
                    case: Case(functools.partial(_image_model, name, case, work, side, batch, device, dtype, False))
                    for case in ("plain", "GRC")
                }
                yield Group("vision", f"{name}, {work}, {batch} images of {side} x {side}", dtype, cases)


def _image_model(
    name: str, case: str, work: str, side: int, batch: int, device: str, dtype: torch.dtype, compiled: bool
) -> Call:
    model = vision.build({**vision.MODELS, **QUICK_MODELS}[name], side, [case])[case].to(device)
    images, labels = vision.image_batch(batch, side, device)
    called: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    if work == "training step":

        def loss() -> Tensor:
            with precision(device, dtype):
                return F.cross_entropy(called(images), labels)

        return training_step(model, loss)
    vision.fold(model)

    @torch.no_grad()
    def infer() -> None:
        with precision(device, dtype):
            called(images)

    return infer


def generation_part(device: str, quick: bool) -> Iterator[Group]:
    """Writing with and without a memory, beside GPT-2 and x-transformers with their caches."""
    sizes = _language_sizes(quick)
    for rows in (1,) if quick else (1, 32):
        text = generation.Text(rows, *((8, 3, 10) if quick else (512, 64, 256)))
        for dtype in DTYPES:
            cases = {name: Case(functools.partial(_their_writer, name, sizes, text, device, dtype)) for name in WRITERS}
            for name in (generation.NO_MEMORY, *generation.STANDARD):
                cases[name] = Case(functools.partial(_our_writer, name, sizes, text, device, dtype))
            yield Group("generation", f"{text}, width {sizes.width}", dtype, cases)


def _our_writer(name: str, sizes: peers.Sizes, text: generation.Text, device: str, dtype: torch.dtype) -> Call:
    model = generation.build(name, sizes, text).to(device, dtype)
    return generation.our_writer(model, text.given(sizes.vocabulary, device), text)


def _their_writer(name: str, sizes: peers.Sizes, text: generation.Text, device: str, dtype: torch.dtype) -> Call:
    try:
        model, write = WRITERS[name].build(sizes, text.prompt + text.tokens)
    except ImportError as error:
        raise Unavailable(peers.lacking(WRITERS[name].distribution, error)) from error
    model.to(device, dtype).eval()
    return functools.partial(write, text.given(sizes.vocabulary, device), text.tokens)


def compiled_part(device: str, quick: bool) -> Iterator[Group]:
    """The same through torch.compile, beside the eager form: image models and language models with a memory."""
    dtype, sizes = torch.bfloat16, _language_sizes(quick)
    side, batch = 224, 64
    language = {name or "no memory": functools.partial(_training, name, sizes, device, dtype) for name in LANGUAGE}
    works: dict[str, Mapping[str, Callable[[bool], Call]]] = {
        _language_work(sizes): {"no memory": language["no memory"]} if quick else language
    }
    for model in () if quick else MODELS:
        works[f"{model}, training step, {batch} images of {side} x {side}"] = {
            case: functools.partial(_image_model, model, case, "training step", side, batch, device, dtype)
            for case in ("plain", "GRC")
        }
    for work, makers in works.items():
        cases = {}
        for case, make in makers.items():
            cases[case] = Case(functools.partial(make, False))
            cases[f"{case}, compiled"] = Case(functools.partial(make, True), like=case)
        yield Group("compiled", work, dtype, cases)


PARTS: dict[str, Part] = {
    "attentions": attention_part,
    "memories": memory_part,
    "vision": vision_part,
    "generation": generation_part,
    "compiled": compiled_part,
}
"""In the order in which they run; what time is left goes to the last."""
