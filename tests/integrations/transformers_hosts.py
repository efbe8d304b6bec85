"""Small random models of transformers that take a memory: six architectures, with inputs for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import contract.outside_memory  # noqa: F401  (registers a user's memory)
import pytest
import torch
from integrations.families import GROUPED, PAIR_SIZES, SEGMENT, SIZES, T5_SIZES
from integrations.hosts import library
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.state import State, named_tensors

VOCABULARY = 30


@dataclass(frozen=True, eq=False)
class Architecture:
    """One class of transformers, its config, and the memory that it is tested with."""

    name: str
    cls: str
    config: str
    sizes: dict[str, Any]
    memory: str = "grc"
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, cls: str | None = None, **more: Any) -> Any:
        """In evaluation mode; the same weights each time."""
        transformers = library("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, "vocab_size": VOCABULARY, **more})
        return getattr(transformers, cls or self.cls)(config).eval()

    def with_memory(self, memory: Any = None, seed: int = 1, **options: Any) -> Any:
        model = self.build()
        torch.manual_seed(seed)
        return add_memory(model, memory or self.memory, **{**({} if memory else self.options), **options})

    def __str__(self) -> str:
        return self.name


_T5 = {**T5_SIZES, "d_model": 16, "d_ff": 32, "num_heads": 2}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
_BART = {**PAIR_SIZES, "d_model": 16, "max_position_embeddings": 32}
_BART |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
_BART |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
_SMALL = {**SIZES, "hidden_size": 16, "num_attention_heads": 2}
_LENGTH = {"length": 4}
_STREAM: dict[str, Any] = {"memory": "grc_stream", "options": {**_LENGTH, "segment_length": SEGMENT}}
BART = Architecture("bart", "BartForConditionalGeneration", "BartConfig", _BART, options=_LENGTH)
T5 = Architecture("t5", "T5ForConditionalGeneration", "T5Config", _T5, options=_LENGTH)
SWITCH = Architecture(
    "switch",
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig",
    {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    options=_LENGTH,
)
_BERT = {**_SMALL, "intermediate_size": 32, "max_position_embeddings": 32}
BERT = Architecture("bert", "BertForMaskedLM", "BertConfig", _BERT, options=_LENGTH)
GPT2 = Architecture("gpt2", "GPT2LMHeadModel", "GPT2Config", _SMALL, **_STREAM)
_LLAMA = {**_SMALL, **GROUPED, "num_attention_heads": 4, "intermediate_size": 32}
LLAMA = Architecture("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA, **_STREAM)
ENCODERS = [BART, T5, SWITCH, BERT]
SEQ2SEQ = [BART, T5, SWITCH]
DECODERS = [GPT2, LLAMA]
STREAMS: dict[str, dict[str, Any]] = {
    "grc_stream": {"name": "grc_stream", "length": 4},
    "memorizing": {"name": "memorizing", "length": 16, "k": 4},
    "rmt": {"name": "rmt", "length": 3},
    "rmt_causal": {"name": "rmt", "length": 3, "mask": "causal"},
    "outside": {"name": "outside_infini"},
}


def architectures(chosen: Iterable[Architecture]) -> pytest.MarkDecorator:
    """Parametrise a test by `host`."""
    return pytest.mark.parametrize("host", list(chosen), ids=str)


streams = pytest.mark.parametrize("memory", list(STREAMS))
"""Parametrise a test by `memory`, a name in STREAMS."""


def stream(host: Architecture, memory: str, segment_length: int | None = SEGMENT) -> Any:
    return host.with_memory(STREAMS[memory], segment_length=segment_length)


def words(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def call_of(host: Architecture, rows: int = 3, tokens: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """A batch for training; the second row is shorter."""
    ids = words(rows, tokens, seed)
    mask = torch.ones_like(ids)
    mask[1, tokens - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def differences(a: State, b: State) -> float:
    """The largest difference between two states of one structure."""
    pairs = list(zip(named_tensors(a), named_tensors(b), strict=True))
    assert pairs and all(x[0] == y[0] and x[1].shape == y[1].shape for x, y in pairs)
    return max((x[1].double() - y[1].double()).abs().max().item() for x, y in pairs if x[1].numel())


def awaken(model: Any, seed: int = 3) -> Any:
    """Larger random weights of the memory, so that what is read shows in the output."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memory." in name:
                parameter.normal_(0, 0.5)
    return model


def by_hand(model: Any, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Logits and state, one segment a call."""
    parts = []
    for piece in ids.split(SEGMENT, 1):
        out = model(piece, memory_state=state)
        state = out.memory_state
        parts.append(out.logits)
    return torch.cat(parts, 1), state


def byte_tokenizer() -> Any:
    """A tokenizer of transformers with an id for each byte, and one between texts: GPT-2's without its merges."""
    library("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
