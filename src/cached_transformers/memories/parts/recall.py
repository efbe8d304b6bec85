"""Contexts made of hidden states inside the layer that attends them.

Legend: B rows, M slots, H heads, E head width, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cached_transformers.seam.memory import Context, ProjectKV


def recall(
    hidden_BMD: Tensor,
    positions_BMP: Tensor,
    valid_BM: Tensor,
    *,
    weight_BM: Tensor | None = None,
    consecutive: bool = False,
) -> Callable[[ProjectKV], Context]:
    """Hidden states (inputs of the layer, before its norm) as a context; values are multiplied by `weight_BM`."""

    def context(project_kv: ProjectKV) -> Context:
        k_BHME, v_BHME = project_kv(torch.where(valid_BM[..., None], hidden_BMD, 0))
        if weight_BM is not None:
            v_BHME = v_BHME * weight_BM[:, None, :, None]
        return Context(k_BHME, v_BHME, positions_BMP, valid_BM, consecutive)

    return context
