"""A small Pyramid Vision Transformer (arXiv:2102.12122) of our layers, as recorded in official_minipvt_r050.npz."""

from __future__ import annotations

from typing import Any

import torch
from grc.golden import Golden, Place, released_places
from torch import Tensor, nn

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.reduction import SpatialReduction
from cached_transformers.memories.grc.grc import GRC


class MiniPVT(nn.Module):
    def __init__(self, meta: dict[str, Any]) -> None:
        super().__init__()
        widths, eps = meta["embed_dims"], meta["ln_eps"]
        self.patches, self.norms, self.stages, self.sizes = nn.ModuleList(), nn.ModuleList(), nn.ModuleList(), []
        self.positions = nn.ParameterList()
        side, channels = meta["img"], 3
        for stage, width in enumerate(widths):
            patch = meta["patch"] if stage == 0 else 2
            side //= patch
            last = stage == len(widths) - 1
            self.sizes.append((side, side))
            self.patches.append(nn.Conv2d(channels, width, patch, patch))
            self.norms.append(nn.LayerNorm(width, eps))
            self.positions.append(nn.Parameter(torch.empty(1, side * side + last, width)))
            heads, ratio = meta["heads"][stage], meta["sr_ratios"][stage]
            blocks = [self._block(width, heads, ratio, side, last, meta, stage) for _ in range(meta["depths"][stage])]
            self.stages.append(nn.ModuleList(blocks))
            channels = width
        self.class_token = nn.Parameter(torch.empty(1, 1, channels))
        self.norm = nn.LayerNorm(channels, eps)
        self.head = nn.Linear(channels, meta["classes"])

    @staticmethod
    def _block(width: int, heads: int, ratio: int, side: int, last: bool, meta: dict[str, Any], stage: int) -> Block:
        cache = int(width * meta["ratio"])
        memory = GRC(
            width,
            heads,
            side * side + last,
            variant="released",
            ratio=meta["ratio"],
            size=(side, side),
            prefix=int(last),
            reduction=SpatialReduction(cache, ratio) if ratio > 1 else None,
        )
        attention = SelfAttention(
            width,
            heads,
            memory=memory,
            norm=nn.LayerNorm(width, meta["ln_eps"]),
            reduction=SpatialReduction(width, ratio) if ratio > 1 else None,
        )
        hidden = width * meta["mlp_ratios"][stage]
        return Block(attention, FeedForward(width, hidden, norm=nn.LayerNorm(width, meta["ln_eps"])))

    def forward(self, x: Tensor) -> Tensor:
        for stage, blocks in enumerate(self.stages):
            x = self.norms[stage](self.patches[stage](x).flatten(2).transpose(1, 2))
            if stage == len(self.stages) - 1:
                x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
            x = x + self.positions[stage]
            for block in blocks:
                x, *_ = block(x, size=self.sizes[stage])
            if stage < len(self.stages) - 1:
                x = x.transpose(1, 2).unflatten(2, self.sizes[stage])
        return self.head(self.norm(x)[:, 0])

    def memories(self) -> dict[str, GRC]:
        """Memory of each recorded attention module."""
        return {
            f"block{s + 1}.{i}.attn": block.attention.memory
            for s, blocks in enumerate(self.stages)
            for i, block in enumerate(blocks)
        }


def places(golden: Golden) -> dict[str, Place]:
    """Map each recorded parameter of the whole model to ours."""
    names, meta = golden.names("param/"), golden.meta
    whole = slice(None)
    table: dict[str, Place] = {"cls_token": (whole, ("class_token",))}
    for kind in ("weight", "bias"):
        table |= {f"norm.{kind}": (whole, (f"norm.{kind}",)), f"head.{kind}": (whole, (f"head.{kind}",))}
    for s, width in enumerate(meta["embed_dims"]):
        table[f"pos_embed{s + 1}"] = (whole, (f"positions.{s}",))
        for kind in ("weight", "bias"):
            table[f"patch_embed{s + 1}.proj.{kind}"] = (whole, (f"patches.{s}.{kind}",))
            table[f"patch_embed{s + 1}.norm.{kind}"] = (whole, (f"norms.{s}.{kind}",))
        for i in range(meta["depths"][s]):
            theirs, ours = f"block{s + 1}.{i}.", f"stages.{s}.{i}."
            cache = int(width * meta["ratio"])
            table |= released_places(width, cache, names, theirs + "attn.", ours + "attention.")
            for kind in ("weight", "bias"):
                table[f"{theirs}norm1.{kind}"] = (whole, (f"{ours}attention.norm.{kind}",))
                table[f"{theirs}norm2.{kind}"] = (whole, (f"{ours}feed_forward.norm.{kind}",))
                table[f"{theirs}mlp.fc1.{kind}"] = (whole, (f"{ours}feed_forward.enter.{kind}",))
                table[f"{theirs}mlp.fc2.{kind}"] = (whole, (f"{ours}feed_forward.leave.{kind}",))
    return table
