"""Layers of transformers that take no memory: models with some are refused, with the reason, others are left as they
are. Imports nothing of transformers.
"""

from __future__ import annotations

from cached_transformers.integrations.hosts import register_left, register_refusals

from .config_utils import in_transformers

RECURRENT = "is no attention in which a memory could stand: it carries a state of its own"
HYBRID = "stands beside layers that attend and carries a state of its own, which each segment would begin anew"
COMPRESSED = "makes keys and values of one compressed vector, and turns a part of each head alone (latent attention)"

_REFUSED = {
    **dict.fromkeys(
        in_transformers("longt5.LongT5LocalAttention", "longt5.LongT5TransientGlobalAttention"),
        "is given a mask of blocks, which does not tell a memory the padding; take a T5",
    ),
    **dict.fromkeys(
        in_transformers("vit_mae.ViTMAEAttention"),
        "sees patches that were drawn at random, so that a slot would be another place in each image; give the memory "
        "to a ViTModel with these weights",
    ),
    **dict.fromkeys(
        in_transformers(
            "mamba.MambaMixer",
            "mamba2.Mamba2Mixer",
            "falcon_mamba.FalconMambaMixer",
            "rwkv.RwkvSelfAttention",
            "xlstm.xLSTMBlock",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        in_transformers(
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
        HYBRID,
    ),
    **dict.fromkeys(
        in_transformers(
            "deepseek_v2.DeepseekV2Attention",
            "deepseek_v3.DeepseekV3Attention",
            "minicpm3.MiniCPM3Attention",
        ),
        COMPRESSED,
    ),
}

register_refusals(_REFUSED)

# What attends the output of another model, or gathers from all tokens with one query.
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
    )
)
