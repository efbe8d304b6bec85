"""Small models of other libraries, of every kind that add_memory knows, with inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cached_transformers import add_memory
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache import caches
from cached_transformers.models.pvt import PyramidVisionTransformer
from cached_transformers.torchvision_guard import ensure_torchvision

ROWS, TOKENS = 3, 6
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def library(name: str) -> Any:
    """The package, made ready for this torch; the test is skipped where it is not installed."""
    ensure_torchvision()
    return pytest.importorskip(name)


@dataclass(frozen=True, eq=False)
class Host:
    """One model: how to build it, what it takes, how its answer becomes a tensor, what add_memory must be told."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    output: Callable[[Any], Tensor] = lambda y: y
    options: dict[str, Any] = field(default_factory=dict)
    recompute: Callable[[Any], None] | None = None
    package: str | None = None

    def build(self, seed: int = 0) -> Any:
        """The same weights for the same seed."""
        if self.package is not None:
            library(self.package)
        torch.manual_seed(seed)
        return self.make()

    def with_memory(self, memory: Any = "grc", **options: Any) -> Any:
        model = self.build()
        torch.manual_seed(1)
        return add_memory(model, memory, **{**self.options, **options})

    def given(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(1000 + seed)
        return self.inputs()

    def run(self, model: Any, given: dict[str, Any], seed: int = 0) -> Tensor:
        """Output of one forward; the seed is that of dropout and drop path."""
        torch.manual_seed(seed)
        return self.output(model(**given))

    def __str__(self) -> str:
        return self.name


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return library("timm").create_model(name, num_classes=5, **options)  # type: ignore[no-any-return]

    return make


def pyramid(**options: Any) -> Callable[[], nn.Module]:
    return lambda: PyramidVisionTransformer(num_classes=5, **options)


def images(height: int, width: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(ROWS, 3, height, width)}


def timm_recompute(model: Any) -> None:
    model.set_grad_checkpointing(True)


def timm_host(name: str, architecture: str, side: int, memory: dict[str, Any] | None = None, **options: Any) -> Host:
    make = timm_model(architecture, **options)
    return Host(name, make, images(side, side), options=memory or {}, recompute=timm_recompute, package="timm")


def encoder(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first", False))

    return make


def padding() -> Tensor:
    """The second row has two, the third three tokens of padding."""
    lengths = torch.tensor([TOKENS, TOKENS - 2, TOKENS - 3])
    return torch.arange(TOKENS) >= lengths[:, None]


def tokens() -> dict[str, Any]:
    return {"src": torch.randn(ROWS, TOKENS, 16)}


def padded_tokens() -> dict[str, Any]:
    return {**tokens(), "src_key_padding_mask": padding()}


def mha(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(16, 2, batch_first=batch_first)


def same_thrice() -> dict[str, Any]:
    x = torch.randn(ROWS, TOKENS, 16)
    return {"query": x, "key": x, "value": x}


def transformers_recompute(model: Any) -> None:
    model.gradient_checkpointing_enable()


def transformers_vit(implementation: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = library("transformers")
        config = transformers.ViTConfig(
            **SIZES, image_size=16, patch_size=4, num_labels=5, attn_implementation=implementation
        )
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    return make


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16)}


def bert(implementation: str, dropout: float = 0.0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = library("transformers")
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        sizes = {**SIZES, "vocab_size": 20, "max_position_embeddings": 16, **dropouts}
        config = transformers.BertConfig(**sizes, attn_implementation=implementation)
        return transformers.BertModel(config, add_pooling_layer=False)  # type: ignore[no-any-return]

    return make


def words() -> dict[str, Any]:
    return {"input_ids": torch.randint(20, (ROWS, TOKENS)), "attention_mask": (~padding()).long()}


def transformers_host(name: str, make: Any, inputs: Any, output: Any, **memory: Any) -> Host:
    return Host(name, make, inputs, output, memory, transformers_recompute, "transformers")


VIT = timm_host("vit", "vit_small_patch16_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
DISTILLED = timm_host(
    "deit_distilled", "deit_tiny_distilled_patch16_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=2
)
SWIN = timm_host("swin", "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=16, depths=(2, 1), num_heads=(2, 2))
_PYRAMID: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2)}
PVT = timm_host("pvt_v2", "pvt_v2_b0", 64, {"input_size": (64, 64)}, **_PYRAMID)
PVT_LINEAR = timm_host("pvt_v2_linear", "pvt_v2_b2_li", 64, {"input_size": (64, 64)}, **_PYRAMID)
_SMALL = {"img_size": 64, "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1)}
PVT_V1 = Host(
    "pvt",
    pyramid(**_SMALL, mlp_ratios=(2, 2, 2, 2)),
    lambda: {"x_BCHW": torch.randn(ROWS, 3, 64, 64)},
    recompute=timm_recompute,
)
_LENGTH = {"length": 4}
ENCODER = Host("encoder", encoder(), tokens, options=_LENGTH)
ENCODER_PADDED = Host("encoder_padded", encoder(), padded_tokens, options=_LENGTH)
ENCODER_PRENORM = Host("encoder_prenorm", encoder(norm_first=True), padded_tokens, options=_LENGTH)
MHA = Host("mha", mha(True), same_thrice, lambda y: y[0], _LENGTH)
MHA_TIME_FIRST = Host("mha_time_first", mha(False), same_thrice, lambda y: y[0], _LENGTH)
MHA_VALUES = Host("mha_values", mha(True), lambda: {**same_thrice(), "need_weights": False}, lambda y: y[0], _LENGTH)
HF_VIT = transformers_host("hf_vit", transformers_vit("sdpa"), pixels, lambda y: y.logits)
BERT_EAGER = transformers_host("bert_eager", bert("eager"), words, lambda y: y.last_hidden_state, **_LENGTH)
BERT_SDPA = transformers_host("bert_sdpa", bert("sdpa"), words, lambda y: y.last_hidden_state, **_LENGTH)
BERT_DROPOUT = transformers_host("bert_dropout", bert("sdpa", 0.1), words, lambda y: y.last_hidden_state, **_LENGTH)

HOSTS = [VIT, DISTILLED, SWIN, PVT, PVT_LINEAR, PVT_V1, ENCODER, ENCODER_PADDED, ENCODER_PRENORM, MHA, MHA_TIME_FIRST]
HOSTS += [HF_VIT, BERT_EAGER, BERT_SDPA, BERT_DROPOUT]
PADDED = [ENCODER_PADDED, ENCODER_PRENORM, BERT_EAGER, BERT_SDPA]


def hosts(chosen: Iterable[Host] = HOSTS, slow: Iterable[Host] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by `host`; those that are `slow` get its marker."""
    late = set(slow)
    marked = [pytest.param(host, id=str(host), marks=[pytest.mark.slow] * (host in late)) for host in chosen]
    return pytest.mark.parametrize("host", marked)


def memories(model: nn.Module) -> list[GRC]:
    return [module for module in model.modules() if isinstance(module, GRC)]


def stored(model: nn.Module) -> list[Tensor]:
    """Copies of the caches, pending proposals included; this commits nothing."""
    return [torch.where(c._fresh, c._proposal_MC, c.cache_MC) for c in caches(model)]


def close_gates(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "close_gate"):
            module.close_gate()


def train(host: Host, model: Any, steps: int = 3, rate: float = 1e-2, run: Any = None) -> list[float]:
    """Losses of AdamW steps (no decay, so that what moves got a gradient) on one batch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    given, losses = host.given(), []
    goal = torch.randn_like(host.run(model, given).detach())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (host.run(model if run is None else run, given) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
