"""Layers of timm and transformers that take no memory: some models are refused with the reason, some layers remain as
they are. Imports neither library."""

from __future__ import annotations

from .hosts import register_left, register_refusals
from .transformers.adapter_utils import in_transformers

RECURRENT = "is no attention layer, and carries a state of its own"
HYBRID = "is beside layers that attend and carries a state of its own, which each segment would begin again"
COMPRESSED = "makes keys and values of one compressed vector, and rotates a part of each head (latent attention)"
CHANNELS = "weighs channels by channels, so that no token has a query for a memory"
MAPS = "gives its output projection a map, where a memory needs tokens and heads"

_TRANSFORMERS = {
    "is given a mask of blocks, which does not tell a memory the padding; take a T5": (
        "longt5.LongT5LocalAttention",
        "longt5.LongT5TransientGlobalAttention",
    ),
    "sees a random subset of patches, so that a slot would be another place in each image; add the memory to a "
    "ViTModel with these weights": ("vit_mae.ViTMAEAttention",),
    RECURRENT: (
        "mamba.MambaMixer",
        "mamba2.Mamba2Mixer",
        "falcon_mamba.FalconMambaMixer",
        "rwkv.RwkvSelfAttention",
        "xlstm.xLSTMBlock",
    ),
    HYBRID: (
        "bamba.BambaMixer",
        "falcon_h1.FalconH1Mixer",
        "granitemoehybrid.GraniteMoeHybridMambaLayer",
        "jamba.JambaMambaMixer",
        "lfm2.Lfm2ShortConv",
        "lfm2_moe.Lfm2MoeShortConv",
        "minimax.MiniMaxLightningAttention",
        "nemotron_h.NemotronHMamba2Mixer",
        "olmo_hybrid.OlmoHybridGatedDeltaNet",
        "qwen3_next.Qwen3NextGatedDeltaNet",
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
        "recurrent_gemma.RecurrentGemmaRecurrentBlock",
        "zamba.ZambaMambaMixer",
        "zamba2.Zamba2MambaMixer",
    ),
    COMPRESSED: (
        "deepseek_v2.DeepseekV2Attention",
        "deepseek_v3.DeepseekV3Attention",
        "minicpm3.MiniCPM3Attention",
    ),
}
register_refusals({name: why for why, names in _TRANSFORMERS.items() for name in in_transformers(*names)})

register_refusals(
    {
        "timm.models.edgenext.CrossCovarianceAttn": CHANNELS,
        "timm.models.hiera.MaskUnitAttention": "pools its queries and orders tokens by mask units, unlike any slots",
        "timm.models.levit.Attention": "has an activation between its heads and their projection",
        "timm.models.levit.AttentionDownsample": "has fewer queries than tokens",
        "timm.models.maxxvit.Attention2d": MAPS,
        "timm.models.maxxvit.AttentionCl": MAPS,
        "timm.models.volo.Attention": MAPS,
        "timm.models.volo.OutlookAttention": "makes its weights from one token, without keys",
        "timm.models.xcit.XCA": CHANNELS,
    }
)

# Attention to another model's output, and one query that pools all tokens.
register_left(
    *in_transformers(
        "bert.BertCrossAttention",
        "bert_generation.BertGenerationCrossAttention",
        "camembert.CamembertCrossAttention",
        "electra.ElectraCrossAttention",
        "ernie.ErnieCrossAttention",
        "longt5.LongT5Attention",
        "roberta.RobertaCrossAttention",
        "roberta_prelayernorm.RobertaPreLayerNormCrossAttention",
        "siglip.SiglipMultiheadAttentionPoolingHead",
        "xlm_roberta.XLMRobertaCrossAttention",
        "xlm_roberta_xl.XLMRobertaXLCrossAttention",
        "xmod.XmodCrossAttention",
    ),
    "timm.layers.attention_pool.AttentionPoolLatent",
    "timm.layers.attention_pool.AttentionPoolPrr",
    "timm.layers.attention_pool2d.AttentionPool2d",
    "timm.layers.attention_pool2d.RotAttentionPool2d",
    "timm.models.cait.ClassAttn",
)

# Weights for channels, or for places of a map, beside layers that attend or convolve.
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
