"""Pyramid Vision Transformer, first version: PVT-Tiny, -Small, -Medium and -Large.

Paper: "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions" (arXiv:2102.12122).
Original implementation: whai362/PVT, classification/pvt.py and detection/pvt.py; parameters have its names, so its
checkpoints load. timm has only the second version; `integrations/timm/timm_models.py` registers this one with it.

Takes images of any size from 32 x 32 pixels on: positions are interpolated bilinearly to the map of each stage, as in
the original (which skips this for maps with an equal number of tokens). Pixels beyond the last whole patch are dropped.

Legend: B rows, N tokens, D model width, C image channels, H image height, W image width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers.checks import at_least_one
from cached_transformers.layers.reduction import to_map

from ..inputs import check_images
from .layers import PatchEmbedding, PyramidBlock, Size, resize_positions

Pool = Literal["token", "avg", ""]


class PyramidVisionTransformer(nn.Module):
    """Image classifier, and backbone with feature maps at strides 4, 8, 16 and 32 (arXiv:2102.12122).

    Args:
        img_size: side, or (height, width), in pixels, of the images whose positions are learned.
        patch_size: of the first stage; later stages halve the map.
        in_chans: of the image. num_classes: outputs; 0 for none.
        global_pool: input of the head: "token", the class token; "avg", the mean of the last map; "", all tokens.
        embed_dims, num_heads, mlp_ratios, depths, sr_ratios: one number per stage.
        class_token: add one before the last stage, for classification; not in the original's detection.
        drop_rate: before the head. pos_drop_rate, proj_drop_rate, attn_drop_rate: after positions, in blocks, on
            attention weights. drop_path_rate: stochastic depth of the last block, growing linearly from 0.
        norm_eps: of all norms.

    Raises:
        ValueError: mismatched sizes, or images below 8 patches a side.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Pool | None = None,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        depths: Sequence[int] = (2, 2, 2, 2),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        qkv_bias: bool = True,
        class_token: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        lengths = {len(s) for s in (embed_dims, num_heads, mlp_ratios, depths, sr_ratios)}
        if lengths != {len(depths)} or len(depths) < 1:
            raise ValueError(
                f"embed_dims, num_heads, mlp_ratios, depths, sr_ratios must have one length, got {lengths}"
            )
        at_least_one(patch_size=patch_size, in_chans=in_chans)
        sides = (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))
        self.img_size, self.in_chans, self.num_classes = sides, in_chans, num_classes
        self.num_stages, self.class_token = len(depths), class_token
        self.smallest = patch_size * 2 ** (self.num_stages - 1)
        self._check(*sides)
        self.global_pool = self._pool(global_pool if global_pool is not None else "token" if class_token else "avg")
        self.num_features = self.head_hidden_size = int(embed_dims[-1])
        self.grad_checkpointing = False
        self.feature_info: list[dict[str, Any]] = []
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist()
        size, channels = sides, in_chans
        for i, dim in enumerate(embed_dims):
            patch = patch_size if i == 0 else 2
            size = (size[0] // patch, size[1] // patch)
            prefix = int(class_token and i == self.num_stages - 1)
            blocks = [
                PyramidBlock(
                    dim,
                    num_heads[i],
                    mlp_ratios[i],
                    norm_eps=norm_eps,
                    drop_path=rates[sum(depths[:i]) + j],
                    sr_ratio=sr_ratios[i],
                    qkv_bias=qkv_bias,
                    attn_drop=attn_drop_rate,
                    proj_drop=proj_drop_rate,
                    size=size,
                    prefix=prefix,
                )
                for j in range(depths[i])
            ]
            setattr(self, f"patch_embed{i + 1}", PatchEmbedding(channels, dim, patch, size))
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(torch.zeros(1, size[0] * size[1] + prefix, dim)))
            setattr(self, f"pos_drop{i + 1}", nn.Dropout(pos_drop_rate))
            setattr(self, f"block{i + 1}", nn.ModuleList(blocks))
            stride = patch_size * 2**i
            self.feature_info.append({"num_chs": dim, "reduction": stride, "module": f"block{i + 1}"})
            channels = dim
        self.norm: nn.Module = nn.LayerNorm(channels, norm_eps)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, channels)) if class_token else None
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(channels, num_classes) if num_classes > 0 else nn.Identity()
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("pos_embed") or name == "cls_token":
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _pool(self, pool: str) -> str:
        if pool not in ("token", "avg", "") or (pool == "token" and not self.class_token):
            known = "'token', 'avg', ''" if self.class_token else "'avg', '' (there is no class token)"
            raise ValueError(f"global_pool={pool!r} must be one of {known}")
        return pool

    def _check(self, height: int, width: int) -> None:
        if min(height, width) < self.smallest:
            raise ValueError(
                f"images of {height} x {width} pixels are smaller than {self.smallest} x {self.smallest}; resize them, "
                "or take a smaller patch_size"
            )

    def _run_stage(self, i: int, x_BCHW: Tensor) -> tuple[Tensor, Size]:
        """Tokens (B, N, D) of stage `i`, after the class token if there is one, and the size of their map."""
        names = (f"patch_embed{i + 1}", f"pos_embed{i + 1}", f"pos_drop{i + 1}", f"block{i + 1}")
        embedding, positions, dropout, blocks = (getattr(self, name) for name in names)
        x_BND, size = embedding(x_BCHW)
        prefix = positions.shape[1] - embedding.size[0] * embedding.size[1]
        if prefix:
            assert self.cls_token is not None
            x_BND = torch.cat([self.cls_token.expand(x_BND.shape[0], -1, -1), x_BND], 1)
        x_BND = dropout(x_BND + resize_positions(positions, embedding.size, size, prefix))
        for block in blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x_BND = checkpoint(block, x_BND, size, use_reentrant=False)
            else:
                x_BND = block(x_BND, size)
        return x_BND, size

    def _map_of(self, x_BND: Tensor, size: Size) -> Tensor:
        """(B, D, height, width) of the tokens after the class token."""
        return to_map(x_BND[:, x_BND.shape[1] - size[0] * size[1] :], size)

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Normed tokens (B, N, D) of the last stage, class token first.

        Raises:
            ValueError: images of another shape or dtype, or smaller than 8 patches a side.
        """
        check_images(x_BCHW, self.in_chans)
        self._check(x_BCHW.shape[2], x_BCHW.shape[3])
        for i in range(self.num_stages - 1):
            x_BCHW = self._map_of(*self._run_stage(i, x_BCHW))
        return self.norm(self._run_stage(self.num_stages - 1, x_BCHW)[0])  # type: ignore[no-any-return]

    def forward_head(self, x_BND: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, classes) of normed tokens, or the input of the head."""
        if self.global_pool == "token":
            x_BND = x_BND[:, 0]
        elif self.global_pool == "avg":
            x_BND = x_BND[:, int(self.class_token) :].mean(1)
        x_BND = self.head_drop(x_BND)
        return x_BND if pre_logits else self.head(x_BND)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        return self.forward_head(self.forward_features(x_BCHW))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Maps (B, D, H / stride, W / stride) of the stages, in timm's form for `features_only=True`.

        Args:
            indices: stages to take; the last n for a number, all for None.
            norm: apply the last norm to the last map. stop_early: run no stage after the last one taken.
            intermediates_only: return only the maps, without the normed tokens.

        Raises:
            ValueError: no such stage, or another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not available; the maps of a pyramid are 'NCHW'")
        taken = self._taken(indices)
        check_images(x, self.in_chans)
        self._check(x.shape[2], x.shape[3])
        last = max(taken) if stop_early else self.num_stages - 1
        maps = []
        x_BND = x
        for i in range(last + 1):
            x_BND, size = self._run_stage(i, x)
            if i == self.num_stages - 1 and (norm or not intermediates_only):
                normed_BND = self.norm(x_BND)
            x = self._map_of(x_BND, size)
            if i in taken:
                maps.append(self._map_of(normed_BND, size) if norm and i == self.num_stages - 1 else x)
        if intermediates_only:
            return maps
        return (normed_BND if last == self.num_stages - 1 else x_BND), maps

    def _taken(self, indices: int | Sequence[int] | None) -> list[int]:
        n = self.num_stages
        chosen = range(n) if indices is None else range(n - indices, n) if isinstance(indices, int) else indices
        taken = [i + n if i < 0 and not isinstance(indices, int) else i for i in chosen]
        if not taken or min(taken) < 0 or max(taken) >= n:
            raise ValueError(f"indices={indices!r} name unknown stages; this model has stages 0 to {n - 1}")
        return taken

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove modules that `forward_intermediates` of these stages does not need (timm's `features_only=True`)."""
        taken = self._taken(indices)
        kept = max(taken) + 1
        for i in range(kept, self.num_stages):
            for name in ("patch_embed", "pos_embed", "pos_drop", "block"):
                delattr(self, f"{name}{i + 1}")
        if kept < self.num_stages:
            self.num_features = self.head_hidden_size = self.feature_info[kept - 1]["num_chs"]
            self.num_stages, self.cls_token, self.class_token, prune_norm = kept, None, False, True
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def no_weight_decay(self) -> set[str]:
        """Parameters that the original trains without weight decay, besides biases and norms."""
        return {"cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers in order, for timm's layer-wise learning rates."""
        entries, stem = r"^(?:patch_embed|pos_embed)(\d+)", r"^cls_token|^pos_embed1|^patch_embed1"
        if coarse:
            return {"stem": stem, "blocks": r"^(?:patch_embed|pos_embed|block)(\d+)"}
        return {"stem": stem, "blocks": [(entries, (0,)), (r"^block(\d+)\.(\d+)", None), (r"^norm", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one with `num_classes` outputs (none for 0), and optionally the pooling."""
        if global_pool is not None:
            self.global_pool = self._pool(global_pool)
        self.num_classes = num_classes
        like = next(self.parameters())
        head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.head = head.to(like.device, like.dtype).train(self.training)
