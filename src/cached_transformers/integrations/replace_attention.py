"""Replace the attention of host models: `replace_attention` and `restore_attention`.

The host's forward runs as it is, with its gates, norms of queries and keys, key reduction and dropout of the output.
During it a `TorchFunctionMode` intercepts its one call of `scaled_dot_product_attention`, and the other attention
answers it. A mode is local to one thread and one call, and torch.compile traces it in one graph;
`docs/design/replace-attention.md` compares it with patched functions and rewritten forwards.

A layer that calls `scaled_dot_product_attention` not once is refused. Not supported: torch.jit, and nn.DataParallel,
whose copies would call the first device's layer (use DDP).

Legend: B rows, H heads, N queries, M keys, E key width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.capabilities import CORE_WORDS, refuse_misfit

from .hosts import Host, Site, sites
from .masks import padding_of
from .segment_context import running
from .through_core import CORES, through_core
from .torch_nn import settle_nested_tensors

Model = TypeVar("Model", bound=nn.Module)


class Intercept(TorchFunctionMode):
    """Answer `scaled_dot_product_attention` by another attention, in the forward of one layer."""

    def __init__(self, exchange: Exchange, x_BND: Tensor) -> None:
        super().__init__()
        self.exchange, self.x_BND, self.calls = exchange, x_BND, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not running().aside:
            self.calls += 1
            return self.exchange.answer(self.x_BND, *args, **(kwargs or {}))
        if func is Tensor.unflatten:  # a method in Python, whose `super()` Dynamo cannot trace from here
            return torch.unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Exchange:
    """The forward of one layer whose attention was replaced."""

    def __init__(self, layer: nn.Module, host: Host, dropout_set: bool) -> None:
        self.layer, self.padding, self.causal = layer, host.attention.padding, "causal" in host.attention.asks
        self.dropout_set = dropout_set
        self.first = next(iter(inspect.signature(layer.forward).parameters))
        self.before = {name: getattr(layer, name) for name in host.attention.switches}
        self.uninstall = host.attention.uninstall

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the layer's class, with another attention in it.

        Raises:
            ValueError: it did not call `scaled_dot_product_attention` once, or the core cannot compute the call.
        """
        mode = Intercept(self, args[0] if args else kwargs[self.first])
        with mode:  # "with ... as mode" would give Dynamo another object
            out = type(self.layer).forward(self.layer, *args, **kwargs)
        if mode.calls != 1:
            raise ValueError(
                f"{type(self.layer).__name__} called scaled_dot_product_attention {mode.calls} times instead of once, "
                "so that its attention could not be replaced; let it use fused attention (transformers: "
                "model.set_attn_implementation('sdpa')), or call restore_attention(model)"
            )
        return out

    def answer(
        self,
        x_BND: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` by the core, in a layer whose input was `x_BND`."""
        core: Any = self.layer.core
        if not self.dropout_set:
            _refuse_dropout(type(self.layer).__name__, dropout_p, core)
        padding_BM = None
        if self.padding and not isinstance(core, SoftmaxAttention):
            padding_BM, attn_mask = padding_of(attn_mask, key.shape[-2], CORES), None
            is_causal = self.causal  # transformers' flag is off for a single query, which sees the keys of a KV cache
        padding: dict[str, Any] = {"padding_BM": padding_BM, "mask": attn_mask}
        return through_core(core, query, key, value, causal=is_causal, scale=scale, x_BND=x_BND, **padding)


def replace_attention(model: Model, attention: str | Mapping[str, Any], **options: Any) -> Model:
    """Replace the softmax attention of every self-attention layer of `model`, in place; weights and host code remain.

    Works with the models that `add_memory` knows, before or after it: the memory then works beside the new attention.
    Parameters of the attention are under `<attention layer>.core` in the state dict.

    Args:
        model: the host model.
        attention: name of an attention, or {"name": ..., option: value}.
        options: options of the attention, and `input_size`, the (height, width) of images, for hosts that do not know
            it (PVTv2 made for other sizes than its default).

    Returns:
        The same model.

    Raises:
        ValueError: a layer's class has no adapter; its attention was replaced already, or cannot be; the new one cannot
            do something that the host asks for: a bias (Swin), fewer keys than queries (PVTv2), a causal form, dropout
            on the weights; or its own constraints. Masks and padding are checked at each call.
    """
    settings = {"name": attention} if isinstance(attention, str) else dict(attention)
    input_size = options.pop("input_size", None)
    settings |= options
    facts = {name: value for name, value in settings.items() if name != "name"}
    found = sites(model, facts | ({"input_size": input_size} if input_size is not None else {}), memory=False)
    built: list[tuple[Site, Host, Attention]] = []
    for index, (site, host) in enumerate(found):  # build all before the model changes: an error leaves it as it was
        where = site.name or type(model).__name__
        if "core" in site.layer._modules:
            raise ValueError(f"the attention of {where} was replaced already; call restore_attention(model) first")
        if host.attention.refusal is not None:
            raise ValueError(f"{where}: {host.attention.refusal}")
        if host.attention.install is None and "forward" in vars(site.layer):
            raise ValueError(f"the forward of {where} was patched already; undo that first")
        facts = {"prefix": 0, **{name: value for name, value in host.facts.items() if value and name != "reduction"}}
        facts |= {"dropout": host.attention.dropout, "causal": "causal" in host.attention.asks}
        facts |= {"width": host.width, "heads": host.heads, "index": index, "depth": len(found)}
        core = create_attention(settings, **facts)
        needs = {word: where for word in CORE_WORDS if word in host.attention.asks}
        refuse_misfit(needs, core.can, core.title, "`cached list attentions` shows which can")
        if "dropout" not in facts:
            _refuse_dropout(where, host.attention.dropout, core)
        reference = next(site.layer.parameters())
        built.append((site, host, core.to(reference.device, reference.dtype).train(site.layer.training)))
    for site, host, core in built:
        layer = site.layer
        layer.core, layer.exchange = core, Exchange(layer, host, "dropout" in facts)
        if host.attention.install is not None:
            host.attention.install(layer)
            continue
        for name, value in host.attention.switches.items():
            setattr(layer, name, value)
        layer.forward = layer.exchange.forward
    settle_nested_tensors(model)
    return model


def _refuse_dropout(where: str, dropout: float, core: Attention) -> None:
    if dropout not in (0.0, core.dropout):
        raise ValueError(
            f"{where} drops {dropout} of the attention weights, which attention {type(core).__name__} does not "
            f"(dropout={core.dropout}); set the host's attention dropout to 0 (timm: attn_drop_rate, transformers: "
            "attention_probs_dropout_prob, torch.nn: dropout), or give the attention a dropout of its own"
        )


def restore_attention(model: Model) -> Model:
    """Undo `replace_attention`, in place: the host computes exactly the same as before. Returns the model.

    Raises:
        ValueError: no attention was replaced.
    """
    layers = [m for m in model.modules() if "exchange" in vars(m)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has the attention that it was made with; there is nothing to restore")
    for layer in layers:
        exchange: Exchange = vars(layer).pop("exchange")
        del layer.core
        if exchange.uninstall is not None:
            exchange.uninstall(layer)
            continue
        del layer.forward
        for name, value in exchange.before.items():
            setattr(layer, name, value)
    settle_nested_tensors(model)
    return model
