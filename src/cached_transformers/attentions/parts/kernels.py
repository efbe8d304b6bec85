"""Kernels of others for what mechanisms here compute: the one place that decides between them and the plain form.

"plain" runs everywhere and is what the kernels are tested against. "flex" is FlexAttention of torch (`flex.py`); "fla"
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


def check_kernel(kernel: str, name: str, *, auto: bool = True) -> None:
    """Refuse (ValueError) a name other than "plain", that of the kernel, and "auto" where there is this choice."""
    known = ("plain", name, "auto") if auto else ("plain", name)
    if kernel not in known:
        raise ValueError(f"kernel={kernel!r} must be one of {', '.join(known)}")


def _takes(kernel: str, lacks: str | None) -> bool:
    """Whether the kernel is to be taken, of which `lacks` says what stands in its way.

    Raises:
        ValueError: it was asked for by name, and something does.
    """
    if lacks is not None and kernel != "auto":
        raise ValueError(f'kernel={kernel!r} cannot take this call: {lacks}; take kernel="plain"')
    return lacks is None


def takes_flex(kernel: str, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, dropout: float) -> bool:
    """Whether FlexAttention is to take a call."""
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
    """Whether flash-linear-attention is to take a call."""
    return kernel != "plain" and _takes(kernel, _fla_lacks(q_BHNF))


def _fla_lacks(q_BHNF: Tensor) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return 'flash-linear-attention is not installed; it comes with: pip install "cached-transformers[kernels]"'
    if not q_BHNF.is_cuda:
        return f"flash-linear-attention runs on GPUs, not on {q_BHNF.device.type}"
    if q_BHNF.dtype == torch.float64:
        return "flash-linear-attention takes nothing wider than float32"
    return None


def fla_scan(q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state_BHFV: Tensor) -> tuple[Tensor, Tensor]:
    """out_i = q_i S_i,  S_i = S_(i-1) + k_i v_i^T, and the last S, as `causal_scan` gives them."""
    return _by_fla("chunk_linear_attn", (q_BHNF, k_BHNF, v_BHNV), state_BHFV, normalize=False)


def fla_delta(
    q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, beta_BHN1: Tensor, state_BHFV: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule, as `delta_scan` gives it, on inputs rounded to bfloat16: the kernel takes nothing wider."""
    given = tuple(t.bfloat16() for t in (q_BHNF, k_BHNF, v_BHNV))
    beta_BNH = beta_BHN1[..., 0].transpose(1, 2).bfloat16().contiguous()
    out, state = _by_fla("chunk_delta_rule", given, state_BHFV, beta=beta_BNH)
    return out.to(v_BHNV.dtype), state


def _by_fla(kernel: str, given: tuple[Tensor, ...], state_BHFV: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    call = getattr(importlib.import_module("fla.ops"), kernel)
    q, k, v = (t.transpose(1, 2).contiguous() for t in given)  # tokens before heads
    options = {"scale": 1.0, "initial_state": state_BHFV, "output_final_state": True}
    out_BNHV, state = call(q=q, k=k, v=v, **options, **more)
    return out_BNHV.transpose(1, 2), state
