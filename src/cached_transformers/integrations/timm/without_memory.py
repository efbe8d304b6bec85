"""Layers of timm that take no memory: some are refused, with the reason, some are left as they are. Imports nothing of
timm."""

from __future__ import annotations

from cached_transformers.integrations.hosts import register_left, register_refusals

CHANNELS = "weighs channels by channels, so that no token asks for anything that a memory could answer"
MAPS = "hands its output projection a map, where a memory needs tokens and heads"

register_refusals(
    {
        "timm.models.edgenext.CrossCovarianceAttn": CHANNELS,
        "timm.models.hiera.MaskUnitAttention": "pools its queries and orders tokens by mask units, unlike any slots",
        "timm.models.levit.Attention": "has an activation between its heads and their projection",
        "timm.models.levit.AttentionDownsample": "has fewer queries than tokens",
        "timm.models.maxxvit.Attention2d": MAPS,
        "timm.models.maxxvit.AttentionCl": MAPS,
        "timm.models.volo.Attention": MAPS,
        "timm.models.volo.OutlookAttention": "makes its weights of one token alone, without keys",
        "timm.models.xcit.XCA": CHANNELS,
    }
)

# One query that gathers from all tokens.
register_left(
    "timm.layers.attention_pool.AttentionPoolLatent",
    "timm.layers.attention_pool.AttentionPoolPrr",
    "timm.layers.attention_pool2d.AttentionPool2d",
    "timm.layers.attention_pool2d.RotAttentionPool2d",
    "timm.models.cait.ClassAttn",
)

# Weights for channels, or for places of a map, beside what attends or convolves.
register_left(
    "timm.layers.cbam.ChannelAttn",
    "timm.layers.cbam.SpatialAttn",
    "timm.layers.coord_attn.CoordAttn",
    "timm.layers.coord_attn.EfficientLocalAttn",
    "timm.layers.coord_attn.SimpleCoordAttn",
    "timm.layers.coord_attn.StripAttn",
    "timm.layers.selective_kernel.SelectiveKernelAttn",
    "timm.layers.split_attn.SplitAttn",
    "timm.models.davit.ChannelAttention",
    "timm.models.davit.ChannelAttentionV2",
)
