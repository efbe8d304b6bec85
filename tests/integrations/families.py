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


@dataclass(frozen=True, eq=False)
class Family:
    """One family: how a tiny model of it is built, and what it is given.

    Attributes:
        title: for people. kind: the heading under which the table has it.
        make: builds the model. inputs: of its forward, made with the seed that is set.
        options: what add_memory must be told beside the memory.
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

    def build(self, seed: int = 0) -> Any:
        """In evaluation mode; the same weights for the same seed."""
        torch.manual_seed(seed)
        model = self.make().eval()
        with torch.no_grad():  # some start with norms of one and biases of zero, behind which mistakes would hide
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and not name.endswith("sinks"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def with_memory(self, memory: Any, seed: int = 1, **options: Any) -> Any:
        model = self.build()
        torch.manual_seed(seed)
        return add_memory(model, memory, **{**self.options, **options})

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
    return Family(name or model_type, title, kind, make, lambda: {"input_ids": words()}, given, refused=refused)


GROUPED = {"num_key_value_heads": 2}
EIGHT = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}

DECODERS = [
    decoder("arcee", "Arcee", **GROUPED),
    decoder("bloom", "BLOOM"),
    decoder("cohere", "Cohere", **GROUPED),
    decoder("cohere2", "Cohere 2", **EIGHT),
    decoder("ernie4_5", "ERNIE 4.5", **EIGHT),
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
    decoder("helium", "Helium", **EIGHT),
    decoder("hunyuan_v1_dense", "HunYuan", **EIGHT),
    decoder("llama", "Llama", **GROUPED),
    decoder("ministral", "Ministral", **EIGHT, sliding_window=16),
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


def families(chosen: Iterable[Family]) -> pytest.MarkDecorator:
    """Parametrise a test by `family`."""
    return pytest.mark.parametrize("family", list(chosen), ids=str)
