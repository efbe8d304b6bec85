"""External kernels: the one place that decides between them and the plain form.

"plain" runs everywhere and is the reference of the kernels' tests. "flex" is FlexAttention of torch (`flex.py`); "fla"
is flash-linear-attention (arXiv:2312.06635), a package of Triton kernels. Both run on GPUs. "auto" takes a kernel where
it can take the call; one that is asked for by name and cannot take a call refuses it.

Legend: B rows, H heads, N tokens, E key width, V value width, F features.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

FlexKernel = Literal["plain", "flex", "auto"]
LinearKernel = Literal["plain", "fla", "auto"]

NARROWEST = 16
"""The least head width that FlexAttention's kernels take."""


def _takes(kernel: str, lacks: str | None) -> bool:
    """Decide whether to use the kernel; `lacks` names an obstacle.

    Raises:
        ValueError: it was asked for by name, and something does.
    """
    if lacks is not None and kernel != "auto":
        raise ValueError(f'kernel={kernel!r} cannot take this call: {lacks}; take kernel="plain"')
    return lacks is None


def takes_flex(kernel: str, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, dropout: float) -> bool:
    """True if FlexAttention computes this call."""
    return kernel != "plain" and _takes(kernel, _flex_lacks((q_BHNE, k_BHNE, v_BHNV), dropout))


def _flex_lacks(tensors: tuple[Tensor, ...], dropout: float) -> str | None:
    device, narrowest = tensors[0].device.type, min(t.shape[-1] for t in tensors)
    if dropout:
        return f"FlexAttention has no dropout of the weights, here {dropout}"
    if device != "cuda":
        return f"FlexAttention runs on a GPU, not on {device}: there it has no backward pass, nor every mask"
    if narrowest < NARROWEST:
        return f"FlexAttention needs heads of at least {NARROWEST} channels, not {narrowest}"
    if tensors[0].dtype == torch.float64:
        return "FlexAttention takes nothing wider than float32"
    if torch._C._functorch.is_batchedtensor(tensors[0]):
        return "FlexAttention has no rule for torch.vmap, under which schedule='diagonal' runs layers"
    return None


def takes_fla(kernel: str, q_BHNF: Tensor) -> bool:
    """True if flash-linear-attention computes this call."""
    return kernel != "plain" and _takes(kernel, _fla_lacks(q_BHNF))


def _fla_lacks(q_BHNF: Tensor) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return 'flash-linear-attention is not installed; it comes with: pip install "cached-transformers[kernels]"'
    if not q_BHNF.is_cuda:
        return f"flash-linear-attention runs on GPUs, not on {q_BHNF.device.type}"
    if q_BHNF.dtype == torch.float64:
        return "flash-linear-attention takes nothing wider than float32"
    return None


FLA_KERNELS = {
    (False, 0): ("fla.ops", "chunk_linear_attn"),
    (False, 1): ("fla.ops", "chunk_simple_gla"),
    (False, 2): ("fla.ops", "chunk_gla"),
    (True, 0): ("fla.ops", "chunk_delta_rule"),
    (True, 1): ("fla.ops", "chunk_gated_delta_rule"),
    (True, 2): ("fla.ops.kda", "chunk_kda"),
}
"""Module and function for (whether it is the delta rule, 0 without decay, 1 with one a head, 2 with one a channel)."""


def fla_scan(
    q_BHNF: Tensor,
    k_BHNF: Tensor,
    v_BHNV: Tensor,
    state_BHFV: Tensor,
    *,
    beta_BHN1: Tensor | None = None,
    log_decay_BHNG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`causal_scan` by kernels. The delta rule rounds inputs to bfloat16: its kernels take nothing wider."""
    delta, decays = beta_BHN1 is not None, 0 if log_decay_BHNG is None else min(log_decay_BHNG.shape[-1], 2)
    module, name = FLA_KERNELS[delta, decays]
    more: dict[str, Any] = {"normalize": False} if (delta, decays) == (False, 0) else {}
    given = tuple(t.bfloat16() for t in (q_BHNF, k_BHNF, v_BHNV)) if delta else (q_BHNF, k_BHNF, v_BHNV)
    if beta_BHN1 is not None:
        more["beta"] = _tokens_first(beta_BHN1[..., 0].bfloat16())
    if log_decay_BHNG is not None:
        more["g"] = _tokens_first(log_decay_BHNG if decays == 2 else log_decay_BHNG[..., 0])
    q, k, v = (_tokens_first(t) for t in given)
    options = {"scale": 1.0, "initial_state": state_BHFV, "output_final_state": True}
    out_BNHV, state = getattr(importlib.import_module(module), name)(q=q, k=k, v=v, **options, **more)
    return out_BNHV.transpose(1, 2).to(v_BHNV.dtype), state


def _tokens_first(t: Tensor) -> Tensor:
    """(B, N, H, ...), in one piece."""
    return t.transpose(1, 2).contiguous()
