"""Published checkpoints of the Pyramid Vision Transformer (whai362/PVT), for models of other sizes too.

Legend: N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .layers import resize_positions


def published_weights(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert a published checkpoint to the state dict of `model`, for other image sizes or without class token.

    Positions of a square map are interpolated (ValueError: the map is not square). Without a class token, the class
    token and its position are left out, as in the original's detection.
    """
    state = dict(state.get("model", state))
    own = model.state_dict()
    if "cls_token" not in own:
        state.pop("cls_token", None)
    for name in [n for n in state if n.startswith("pos_embed") and n in own]:
        size = getattr(model, name.replace("pos_embed", "patch_embed")).size
        prefix = own[name].shape[1] - size[0] * size[1]
        last = name == f"pos_embed{len(model.feature_info)}"  # type: ignore[arg-type]
        positions_1ND = state[name]
        theirs = int(last and _square(positions_1ND.shape[1] - 1) > 0)
        side = _square(positions_1ND.shape[1] - theirs)
        if side and theirs >= prefix:
            state[name] = resize_positions(positions_1ND[:, theirs - prefix :], (side, side), size, prefix)
        elif positions_1ND.shape != own[name].shape:
            raise ValueError(
                f"{name}: {positions_1ND.shape[1]} positions are no square map, so they cannot be interpolated to "
                f"{size[0]} x {size[1]}; build the model with the img_size of the checkpoint"
            )
    return state


def _square(cells: int) -> int:
    """The side of a square map of `cells` cells; 0 if it is not square."""
    side = int(cells**0.5 + 0.5)
    return side if side * side == cells else 0
