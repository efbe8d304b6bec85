"""Kernels of others for what mechanisms here compute: the one place that decides between them and the plain form.

"plain" runs everywhere and is what the kernels are tested against. "flex" is FlexAttention of torch (arXiv:2412.05496),
which computes the pairs of a block mask and nothing else; "fla" is flash-linear-attention (arXiv:2312.06635), a package
of Triton kernels. Both run on GPUs. "auto" takes a kernel where it can take the call; one that is asked for by name and
cannot take a call refuses it.

Legend: B rows, H heads, N tokens, E key width, V value width, F features, Q blocks of queries, K blocks of keys.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.seam.attention import Call

PatternKernel = Literal["plain", "flex", "auto"]
LinearKernel = Literal["plain", "fla", "auto"]
Sees = Callable[[Tensor, Tensor], Tensor]

BLOCK = 128
"""Tokens of a block of FlexAttention's mask."""
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
    return None


def flex_attend(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNV: Tensor,
    sees: Sees,
    near_QK: Tensor,
    call: Call,
    everywhere_G: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One softmax of each query over the keys that it `sees` and those at `everywhere_G`, by FlexAttention.

    Args:
        sees: of places of queries and keys, as `windows.Sees`.
        near_QK: bool, blocks of `BLOCK` tokens in which there may be such keys; `sees` has the last word.
        call: padding, `causal` (which here only limits the keys seen by all) and `want_lse` are read.
        everywhere_G: places of keys that each query sees.

    Returns:
        (B, H, N, V), and the log-sum-exp (B, H, N) where it is wanted. A query that sees no key gives 0, and the lowest
        finite number as its log-sum-exp.
    """
    # What the mask closes over is compiled with it: of the call no more than it needs, and lengths as tensors.
    tokens, device, causal = q_BHNE.shape[2], q_BHNE.device, call.causal
    length = near_QK.shape[1] * BLOCK
    everywhere_N = torch.zeros(length, dtype=torch.bool, device=device)
    if everywhere_G is not None:
        everywhere_N = everywhere_N.index_fill(0, everywhere_G, True)
        near_QK = near_QK | everywhere_N.view(-1, BLOCK).any(1)

    def shown(i: Tensor, j: Tensor) -> Tensor:
        return sees(i, j) | (everywhere_N[j] & (j <= i) if causal else everywhere_N[j])

    mask: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    if call.key_padding_mask is None:
        there_N = torch.arange(length, device=device) < tokens

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return shown(i, j) & there_N[j]
    else:
        there_BN = ~F.pad(call.key_padding_mask, (0, length - tokens), value=True)

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return shown(i, j) & there_BN[b, j]

    flex = importlib.import_module("torch.nn.attention.flex_attention")
    count_Q = near_QK.sum(1, dtype=torch.int32)
    order_QK = near_QK.int().argsort(dim=1, descending=True, stable=True).int()
    blocks = flex.BlockMask.from_kv_blocks(count_Q[None, None], order_QK[None, None], BLOCK_SIZE=BLOCK, mask_mod=mask)
    q, k, v = (F.pad(t, (0, 0, 0, length - tokens)) for t in (q_BHNE, k_BHNE, v_BHNV))
    found = _compiled_flex()(q, k, v, block_mask=blocks, return_lse=call.want_lse)
    if not call.want_lse:
        return found[:, :, :tokens], None
    out, lse = (t[:, :, :tokens] for t in found)
    return out, lse.clamp(min=torch.finfo(lse.dtype).min)


@functools.cache
def _compiled_flex() -> Any:
    """Without a compiler FlexAttention makes all pairs; it must not go back to that after so many compilations, either,
    which `fullgraph` turns into an error."""
    return torch.compile(importlib.import_module("torch.nn.attention.flex_attention").flex_attention, fullgraph=True)


def near_blocks(tokens: int, before: int, after: int, device: torch.device) -> Tensor:
    """(Q, K) bool: blocks in which there are keys from so many tokens before a query to so many after it."""
    first_Q = torch.arange(0, tokens, BLOCK, device=device)
    apart_QK = first_Q[:, None] - first_Q
    return (apart_QK < before + BLOCK) & (-apart_QK < after + BLOCK)


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
