"""Contexts made of hidden states inside the layer that attends them.

Legend: B rows, M slots, D model width, P position channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Context, ProjectKV


def recalled(
    project_kv: ProjectKV,
    *,
    hidden_BMD: Tensor,
    positions_BMP: Tensor,
    valid_BM: Tensor,
    weight_BM: Tensor | None = None,
    consecutive: bool = False,
) -> Context:
    """Hidden states (inputs of the layer, before its norm) as a context; values are multiplied by `weight_BM`.

    A model memory offers `functools.partial(recalled, hidden_BMD=..., ...)`, to which the layer gives its projections.
    """
    k_BHME, v_BHME = project_kv(torch.where(valid_BM[..., None], hidden_BMD, 0))
    if weight_BM is not None:
        v_BHME = v_BHME * weight_BM[:, None, :, None]
    return Context(k_BHME, v_BHME, positions_BMP, valid_BM, consecutive, clean=weight_BM is None)
