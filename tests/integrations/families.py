"""Families of models, each with a tiny config: the one list that tests and docs/support.md are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from integrations.hosts import library
from torch import Tensor, nn

from cached_transformers import add_memory

VOCABULARY, END, PAD, WIDTH, SEGMENT = 64, 1, 2, 32, 5
ROWS = 2
CARRYING = ("grc_stream", "memorizing", "rmt", "memory_transformer")
"""Memories of each row, with a state or, as a control of those, with an empty one."""


@dataclass(frozen=True, eq=False)
class Family:
    """One family: how a tiny model of it is built, and what it is given.

    Attributes:
        title: for people. kind: the heading under which the table has it.
        make: builds the model. inputs: of its forward, made with the seed that is set.
        options: what add_memory must be told beside the memory. carrying: and beside one that carries a state.
        output: the tensor of its answer that is compared.
        refused: part of the message, where no memory fits.
    """

    name: str
    title: str
    kind: str
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    output: Callable[[Any], Tensor] = lambda out: out.logits
    refused: str = ""
    carrying: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> Any:
        """In evaluation mode; the same weights for the same seed."""
        torch.manual_seed(seed)
        model = self.make().eval()
        # Some start with norms of one, biases of zero and a head of next to nothing, behind which mistakes would hide.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name == "head.weight":
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def with_memory(self, memory: Any, seed: int = 1, **options: Any) -> Any:
        model = self.build()
        torch.manual_seed(seed)
        carries = (memory if isinstance(memory, str) else memory["name"]) in CARRYING
        return add_memory(model, memory, **{**(self.carrying if carries else self.options), **options})

    def given(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(1000 + seed)
        return self.inputs()

    def __str__(self) -> str:
        return self.name


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": PAD,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
}


def words(rows: int = ROWS, tokens: int = 12, seed: int = 0) -> Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _causal(model_type: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = library("transformers")
        config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **sizes})
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]

    return make


def decoder(model_type: str, title: str, *, name: str = "", refused: str = "", **sizes: Any) -> Family:
    make = _causal(model_type, sizes)
    kind = "decoders"
    given = {"segment_length": SEGMENT}
    return Family(
        *(name or model_type, title, kind, make, lambda: {"input_ids": words()}, given), refused=refused, carrying=given
    )


GROUPED = {"num_key_value_heads": 2}
EIGHT = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}

DECODERS = [
    decoder("arcee", "Arcee", **GROUPED),
    decoder("bloom", "BLOOM"),
    decoder("cohere", "Cohere", **GROUPED),
    decoder("cohere2", "Cohere 2", **EIGHT),
    decoder("ernie4_5", "ERNIE 4.5", **EIGHT),
    decoder("ernie4_5_moe", "ERNIE 4.5 MoE", **EIGHT, moe_num_experts=2, moe_k=1, moe_intermediate_size=32),
    decoder("exaone4", "EXAONE 4", **EIGHT),
    decoder("falcon", "Falcon (one head of keys)", multi_query=True, new_decoder_architecture=False),
    decoder("falcon", "Falcon (groups)", name="falcon_groups", new_decoder_architecture=True, num_kv_heads=2),
    decoder(
        "falcon", "Falcon (alibi)", name="falcon_alibi", alibi=True, multi_query=False, new_decoder_architecture=False
    ),
    decoder("gemma", "Gemma", **EIGHT),
    decoder("gemma2", "Gemma 2", **EIGHT, sliding_window=16),
    decoder("gemma3_text", "Gemma 3 (text)", **EIGHT, sliding_window=16),
    decoder("glm", "GLM", **EIGHT),
    decoder("glm4", "GLM 4", **EIGHT),
    decoder("gpt2", "GPT-2"),
    decoder("gpt_bigcode", "GPT-BigCode"),
    decoder("gpt_neo", "GPT-Neo", attention_types=[[["global", "local"], 1]], window_size=4),
    decoder("gpt_neox", "GPT-NeoX, Pythia"),
    decoder("gpt_oss", "GPT-OSS", **EIGHT, **EXPERTS, sliding_window=16),
    decoder("gptj", "GPT-J", rotary_dim=4),
    decoder("granite", "Granite", **GROUPED),
    decoder("granitemoe", "Granite MoE", **GROUPED, **EXPERTS),
    decoder("granitemoeshared", "Granite MoE (shared experts)", **GROUPED, **EXPERTS, shared_intermediate_size=32),
    decoder("helium", "Helium", **EIGHT),
    decoder("hunyuan_v1_dense", "HunYuan", **EIGHT),
    decoder("jais2", "Jais 2", **EIGHT),
    decoder("llama", "Llama", **GROUPED),
    decoder("ministral", "Ministral", **EIGHT, sliding_window=16),
    decoder("ministral3", "Ministral 3", **EIGHT),
    decoder("mistral", "Mistral", **GROUPED, sliding_window=16),
    decoder("mixtral", "Mixtral", **GROUPED, **EXPERTS),
    decoder("nemotron", "Nemotron", **EIGHT),
    decoder("olmo", "OLMo", **GROUPED),
    decoder("olmo2", "OLMo 2", **GROUPED),
    decoder("olmo3", "OLMo 3", **GROUPED, sliding_window=16),
    decoder("olmoe", "OLMoE", **GROUPED, **EXPERTS),
    decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=WIDTH),
    decoder("phi", "Phi", qk_layernorm=True),
    decoder("phi3", "Phi-3, Phi-4", **GROUPED),
    decoder("phimoe", "Phi-3.5 MoE", **GROUPED, **EXPERTS),
    decoder("qwen2", "Qwen 2", **GROUPED),
    decoder("qwen2_moe", "Qwen 2 MoE", **GROUPED, **EXPERTS, shared_expert_intermediate_size=32),
    decoder("qwen3", "Qwen 3", **EIGHT),
    decoder("qwen3_moe", "Qwen 3 MoE", **EIGHT, **EXPERTS),
    decoder("seed_oss", "Seed-OSS", **EIGHT),
    decoder("smollm3", "SmolLM 3", **GROUPED),
    decoder("stablelm", "StableLM", **GROUPED, qk_layernorm=True),
    decoder("starcoder2", "StarCoder 2", **GROUPED, sliding_window=16),
]


_EXPERT = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
_MIXED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA: dict[str, Any] = {
    **{**_MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA: dict[str, Any] = {
    **{**GROUPED, "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    **{"mamba_d_conv": 3, "mamba_chunk_size": 4},
}
_CONV: dict[str, Any] = {**GROUPED, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
HYBRIDS = [
    decoder("bamba", "Bamba", **_MAMBA, attn_layer_indices=[1, 3]),
    decoder(
        "granitemoehybrid",
        "Granite 4 (hybrid)",
        **{**_MAMBA, **EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2},
    ),
    decoder("lfm2", "LFM2", **_CONV, block_auto_adjust_ff_dim=False),
    decoder("lfm2_moe", "LFM2 MoE", **_CONV, **_EXPERT, num_dense_layers=2),
    decoder(
        "nemotron_h",
        "Nemotron-H",
        **{**EIGHT, "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "conv_kernel": 3, "chunk_size": 4},
        n_groups=2,
    ),
    decoder("olmo_hybrid", "OLMo Hybrid", **GROUPED, **_DELTA),
    decoder("qwen3_5_text", "Qwen 3.5", **EIGHT, **_DELTA),
    decoder("qwen3_5_moe_text", "Qwen 3.5 MoE", **EIGHT, **_DELTA, **_EXPERT, shared_expert_intermediate_size=32),
    decoder("qwen3_next", "Qwen3-Next", **EIGHT, **_DELTA, **_EXPERT, shared_expert_intermediate_size=32),
]
"""Decoders with recurrent layers beside those that attend."""


def hidden(out: Any) -> Tensor:
    """The output of an encoder."""
    states: Tensor = out.last_hidden_state
    return states


def itself(out: Tensor) -> Tensor:
    """The output of a model of timm."""
    return out


def padded_words() -> dict[str, Any]:
    """The second row is shorter."""
    mask = torch.ones(ROWS, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": words(), "attention_mask": mask}


def pixels(side: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(ROWS, 3, side, side)}


def waves() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 400)}


def _model(cls: str, config: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = library("transformers")
        return getattr(transformers, cls)(getattr(transformers, config)(**sizes))  # type: ignore[no-any-return]

    return make


LENGTH = {"length": 4}


def encoder(stem: str, title: str, cls: str = "Model", *, refused: str = "", **sizes: Any) -> Family:
    """An encoder of texts; the name of its classes begins with `stem`."""
    make = _model(stem + cls, stem + "Config", {**SIZES, **sizes})
    pieces = {"segment_length": SEGMENT}
    return Family(stem.lower(), title, "encoders of texts", make, padded_words, LENGTH, hidden, refused, pieces)


PATCHES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


def patches(stem: str, title: str, cls: str = "Model", config: str = "", *, refused: str = "", **sizes: Any) -> Family:
    """An encoder of images."""
    make = _model(stem + cls, config or stem + "Config", {**PATCHES, **sizes})
    return Family(stem.lower(), title, "encoders of images", make, pixels(), {}, hidden, refused)


PAIR_SIZES: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "max_position_embeddings", "dropout")},
    **{name: SIZES[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **{"d_model": WIDTH, "decoder_start_token_id": 0, "forced_eos_token_id": None},
}
T5_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_heads": 4, "dropout_rate": 0.0},
    **{"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0, "eos_token_id": END, "pad_token_id": PAD},
}


def pair(
    stem: str, title: str, cls: str = "ForConditionalGeneration", *, refused: str = "", given: Any = None, **sizes: Any
) -> Family:
    """An encoder-decoder; the memory stands in its encoder."""
    make = _model(stem + cls, stem + "Config", sizes)

    def inputs() -> dict[str, Any]:
        return {**(given or padded_words)(), "decoder_input_ids": words(tokens=5, seed=1)}

    return Family(stem.lower(), title, "encoder-decoders", make, inputs, LENGTH, refused=refused)


def sounds() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 8, 24)}


ENCODERS = [
    encoder("Albert", "ALBERT", embedding_size=16, num_hidden_groups=1),
    encoder("Bert", "BERT"),
    encoder("BertGeneration", "BERT for generation", "Encoder"),
    encoder("Camembert", "CamemBERT"),
    encoder("Deberta", "DeBERTa", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("DebertaV2", "DeBERTa v2, v3", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("DistilBert", "DistilBERT", hidden_dim=64),
    encoder("Electra", "ELECTRA", embedding_size=16),
    encoder("Ernie", "ERNIE"),
    encoder("MegatronBert", "Megatron-BERT"),
    encoder(
        "ModernBert", "ModernBERT", local_attention=4, global_attn_every_n_layers=2, cls_token_id=3, sep_token_id=4
    ),
    encoder("MPNet", "MPNet"),
    encoder("RemBert", "RemBERT", input_embedding_size=16, output_embedding_size=16),
    encoder("Roberta", "RoBERTa"),
    encoder("RobertaPreLayerNorm", "RoBERTa (norms before)"),
    encoder("XLMRoberta", "XLM-RoBERTa"),
    encoder("XLMRobertaXL", "XLM-RoBERTa XL"),
    encoder("Xmod", "X-MOD", languages=["en"], default_language="en"),
    encoder("CLIPText", "CLIP (texts alone)", refused="reads causally"),
    encoder("SiglipText", "SigLIP (texts)"),
]
IMAGES = [
    patches("Beit", "BEiT", use_relative_position_bias=True, vocab_size=8),
    patches("CLIPVision", "CLIP (images)"),
    patches("DeiT", "DeiT"),
    patches("Dinov2", "DINOv2"),
    patches("Dinov2WithRegisters", "DINOv2 with registers", num_register_tokens=2),
    patches("DINOv3ViT", "DINOv3", num_register_tokens=2),
    patches("IJepa", "I-JEPA"),
    patches("SiglipVision", "SigLIP (images)"),
    patches("Swin", "Swin", num_attention_heads=[2, 2], embed_dim=16, depths=[2, 1], window_size=2, patch_size=2),
    patches("ViT", "ViT"),
    patches("ViTMAE", "ViTMAE", refused="no adapter for attention class"),
    patches("ViTMSN", "MSN"),
]
PAIRS = [
    pair("Bart", "BART", **PAIR_SIZES),
    pair("Blenderbot", "Blenderbot", **PAIR_SIZES),
    pair("BlenderbotSmall", "Blenderbot (small)", **PAIR_SIZES),
    pair("LongT5", "LongT5", refused="no adapter for attention class", **T5_SIZES),
    pair("M2M100", "M2M-100, NLLB", **PAIR_SIZES),
    pair("Marian", "Marian", "MTModel", **PAIR_SIZES),
    pair("MBart", "mBART", **PAIR_SIZES),
    pair("MT5", "mT5", **T5_SIZES),
    pair("Pegasus", "Pegasus", **PAIR_SIZES),
    pair("PLBart", "PLBart", **PAIR_SIZES),
    pair(
        "SwitchTransformers",
        "Switch",
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        **T5_SIZES,
    ),
    pair("T5", "T5", **T5_SIZES),
    pair("UMT5", "umT5", **T5_SIZES),
    pair(
        "Whisper",
        "Whisper",
        given=sounds,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=64,
        **PAIR_SIZES,
    ),
]
_SOUNDS: dict[str, Any] = {
    **{**SIZES, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "activation_dropout": 0.0, "layerdrop": 0.0},
    **{"feat_proj_dropout": 0.0, "final_dropout": 0.0, "mask_time_prob": 0.0},
}


def _sound(stem: str, title: str) -> Family:
    make = _model(stem + "Model", stem + "Config", _SOUNDS)
    return Family(stem.lower(), title, "encoders of sounds", make, waves, LENGTH, hidden)


SOUNDS = [_sound("Hubert", "HuBERT"), _sound("Wav2Vec2", "Wav2Vec 2.0")]


def _timm(architecture: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: library("timm").create_model(architecture, num_classes=5, **sizes)  # type: ignore[no-any-return]


def timm_family(name: str, title: str, architecture: str, side: int = 32, *, refused: str = "", **sizes: Any) -> Family:
    def inputs() -> dict[str, Any]:
        return {"x": torch.randn(ROWS, 3, side, side)}

    return Family(name, title, "timm", _timm(architecture, sizes), inputs, {}, itself, refused)


_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TIMM = [
    timm_family("timm_beit", "BEiT", "beit_base_patch16_224", **_VIT),
    timm_family("timm_cait", "CaiT", "cait_xxs24_224", **_VIT),
    timm_family("timm_davit", "DaViT", "davit_tiny", 56, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2)),
    timm_family("timm_eva", "EVA-02", "eva02_tiny_patch14_224", **_VIT),
    timm_family("timm_dinov3", "DINOv3", "vit_small_patch16_dinov3", **_VIT),
    timm_family("timm_siglip", "SigLIP (pooling head)", "vit_base_patch16_siglip_224", **_VIT),
    timm_family(
        "timm_swin_v2",
        "Swin v2",
        "swinv2_tiny_window8_256",
        32,
        img_size=32,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 2),
    ),
    timm_family("timm_vit", "ViT, DeiT", "vit_small_patch16_224", **_VIT),
    timm_family("timm_hiera", "Hiera", "hiera_tiny_224", 224, refused="no adapter for attention class"),
    timm_family("timm_levit", "LeViT", "levit_128s", 224, refused="no adapter for attention class"),
    timm_family("timm_maxvit", "MaxViT", "maxvit_rmlp_pico_rw_256", 256, refused="no adapter for attention class"),
    timm_family("timm_resnet", "ResNet-50", "resnet50", 64, refused="has no attention layer"),
    timm_family("timm_volo", "VOLO", "volo_d1_224", 224, refused="no adapter for attention class"),
    timm_family("timm_xcit", "XCiT", "xcit_nano_12_p16_224", 224, refused="has no attention layer"),
]
WITHOUT = [
    decoder("mamba", "Mamba", refused="has no attention layer", state_size=4),
    decoder("rwkv", "RWKV", refused="no adapter for attention class", attention_hidden_size=WIDTH),
    decoder(
        "jamba",
        "Jamba",
        refused="does not continue from its state",
        **{**GROUPED, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        mamba_dt_rank=4,
    ),
    decoder(
        "deepseek_v3",
        "DeepSeek v3",
        refused="no adapter for attention class",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    ),
]
ALL = [*DECODERS, *HYBRIDS, *WITHOUT, *ENCODERS, *PAIRS, *IMAGES, *SOUNDS, *TIMM]


def families(chosen: Iterable[Family]) -> pytest.MarkDecorator:
    """Parametrise a test by `family`."""
    return pytest.mark.parametrize("family", list(chosen), ids=str)
