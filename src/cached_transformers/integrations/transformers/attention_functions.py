"""Attention mechanisms as attention functions of transformers: `attn_implementation="cached_longformer"`.

transformers looks attention up by name, so that a model can use a mechanism without any change: encoders, and decoders
with mechanisms that have a causal form. Its layers have no place for parameters, and do not pass their input on: a
mechanism with parameters or buffers, or one that reads the layer's input, needs `replace_attention`.

transformers builds masks by a function registered under the same name. This one passes padding on as (B, M), 1 = keep;
causality is the flag of the layer, as with flash attention. Everything else is refused: sliding windows, chunks, packed
sequences, the user's masks that differ between queries, keys of a KV cache (generate with use_cache=False).

Legend: B rows, H heads, N queries, M keys, E key width, V value width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.attentions import create_attention
from cached_transformers.extras import require
from cached_transformers.integrations.masks import padding_of
from cached_transformers.integrations.through_core import CORES, through_core
from cached_transformers.interfaces.attention import Attention
from cached_transformers.registry import ATTENTIONS

_UNSERVED = (
    "position_bias",
    "softcap",
    "sliding_window",
    "s_aux",
    "head_mask",
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "output_attentions",
)
"""Arguments that would change the result, or request another one."""


class AttentionFunction:
    """A mechanism in transformers' attention interface, built at the first call of a layer.

    It has nothing that is trained or saved, so that layers with equal facts share one.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.cores: dict[Any, Attention] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Values (B, N, H, V), and no weights.

        Raises:
            ValueError: an argument that the mechanism, or every mechanism, cannot serve here.
        """
        for name in _UNSERVED:
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(
                    f"{type(module).__name__} calls its attention with {name}, which {self.spec['name']!r} does not "
                    "take in transformers' attention interface; use attn_implementation='eager' or 'sdpa'"
                )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and query.shape[2] != key.shape[2]:
            raise ValueError(_keys_of_a_cache(query.shape[2], key.shape[2]))
        padding_BM = padding_of(attention_mask, key.shape[2], CORES)
        out_BHNV = through_core(
            self._core(module, query, causal, dropout),
            query,
            key,
            value,
            padding_BM=padding_BM,
            causal=causal,
            scale=scaling,
        )
        return out_BHNV.transpose(1, 2).contiguous(), None

    def _core(self, module: nn.Module, query: Tensor, causal: bool, dropout: float) -> Attention:
        config = getattr(module, "config", None)
        facts = {
            "width": query.shape[1] * query.shape[3],
            "heads": query.shape[1],
            "length": getattr(config, "max_position_embeddings", None),
            "prefix": 0,
            "index": getattr(module, "layer_idx", None),
            "depth": getattr(config, "num_hidden_layers", None),
            "causal": causal,
            "dropout": dropout,
        }
        key = (*facts.values(), module.training, query.device)
        if key in self.cores:
            return self.cores[key]
        known = {name: value for name, value in facts.items() if value is not None and name not in self.spec}
        core = create_attention(self.spec, **known)
        if dropout not in (0.0, core.dropout) and "dropout" not in self.spec:
            raise ValueError(
                f"{type(module).__name__} drops {dropout} of the attention weights, which attention "
                f"{self.spec['name']!r} does not; set the attention dropout of the config to 0"
            )
        core = core.to(query.device).train(module.training)
        # A core that is made while a graph is traced belongs to the graph.
        if not torch.compiler.is_compiling():
            self.cores[key] = core
        return core


def _keys_of_a_cache(queries: int, keys: int) -> str:
    return (
        f"{queries} queries and {keys} keys of a cache: attentions of cached_transformers read whole sequences in "
        "transformers' attention interface; generate with use_cache=False"
    )


class PaddingMask:
    """The mask function of transformers for these mechanisms.

    Args:
        causal, bidirectional: transformers' functions of plain masks.
    """

    def __init__(self, causal: Any, bidirectional: Any) -> None:
        self.causal, self.bidirectional = causal, bidirectional

    def __call__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        **others: Any,
    ) -> Tensor | None:
        """Padding (B, M), 1 = keep; None where no row is padded.

        Raises:
            ValueError: the mask holds more than causality and padding; or the keys are those of a KV cache.
        """
        if use_vmap or (mask_function is not self.causal and mask_function is not self.bidirectional):
            raise ValueError(
                "this model's attention mask holds more than causality and padding (a sliding window, chunks, packed "
                "sequences, a function of the user's), which attentions of cached_transformers do not know in "
                "transformers' attention interface"
            )
        if mask_function is self.causal and q_length != kv_length:
            raise ValueError(_keys_of_a_cache(q_length, kv_length))
        if attention_mask is None:
            return None
        keep_BM = attention_mask[:, -kv_length:].bool()
        return keep_BM if torch.compiler.is_compiling() or not keep_BM.all() else None


def register_attention_function(attention: str | Mapping[str, Any], key: str | None = None, **options: Any) -> str:
    """Register an attention with transformers, as a value of `attn_implementation`.

    Args:
        attention: name of an attention, or {"name": ..., option: value}.
        key: its name there; "cached_" and the attention's own when None.
        options: options of the attention.

    Returns:
        The name.

    Raises:
        ValueError: the attention has parameters or buffers to save; it needs more than queries, keys and values;
            unknown name or option.
        ImportError: transformers is not installed.
    """
    spec = {"name": attention} if isinstance(attention, str) else dict(attention)
    spec |= options
    facts = {"width": 16, "heads": 2, "length": 8, "prefix": 0, "index": 0, "depth": 1, "causal": False, "dropout": 0.0}
    core = create_attention(spec, **{key: value for key, value in facts.items() if key not in spec})
    name = spec["name"]
    if core.state_dict():
        raise ValueError(
            f"attention {name!r} has {', '.join(core.state_dict())} to save, for which transformers' attention "
            "interface has no place; use replace_attention(model, ...)"
        )
    try:
        q_BHNE = torch.zeros(1, 2, 8, 8)
        core.eval()(q_BHNE, q_BHNE, q_BHNE, causal="bidirectional" not in core.can)
    except ValueError as error:
        raise ValueError(
            f"attention {name!r} needs more than transformers' attention interface gives: {error}"
        ) from error
    key = key or f"cached_{name}"
    plain = require("transformers.masking_utils", extra="language")
    mask = PaddingMask(plain.causal_mask_function, plain.bidirectional_mask_function)
    plain.AttentionMaskInterface.register(key, mask)
    require("transformers", extra="language").AttentionInterface.register(key, AttentionFunction(spec))
    return key


def register_attention_functions() -> list[str]:
    """Register every attention that fits transformers' interface, with its default options.

    Returns:
        The names.
    """
    done = []
    for name in ATTENTIONS.names():
        try:
            done.append(register_attention_function(name))
        except ValueError:  # for replace_attention
            continue
    return done
