"""Language models of others that keep keys and values while they write: what our generation is timed beside.

transformers' GPT-2 comes with `pip install cached-transformers[language]`, x-transformers by itself (see `peers`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.extras import require

from .peers import Sizes, x_decoder

Write = Callable[[Tensor, int], Tensor]
"""New tokens (B, T) after a prompt (B, N), greedily: T is the second argument."""


class Published(NamedTuple):
    """The distribution that holds a peer, and what builds it with a place for so many tokens."""

    distribution: str
    build: Callable[[Sizes, int], tuple[nn.Module, Write]]


def gpt2(sizes: Sizes, length: int) -> tuple[nn.Module, Write]:
    """GPT-2 of transformers with fused attention and its own cache."""
    library = require("transformers", extra="language")
    config = library.GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=length,
        n_embd=sizes.width,
        n_layer=sizes.depth,
        n_head=sizes.heads,
        n_inner=4 * sizes.width,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = library.GPT2LMHeadModel(config)

    def write(prompt_BN: Tensor, tokens: int) -> Tensor:
        options = {"do_sample": False, "use_cache": True, "max_new_tokens": tokens, "pad_token_id": 0}
        with torch.no_grad():
            text_BL = model.generate(prompt_BN, attention_mask=torch.ones_like(prompt_BN), **options)
        return text_BL[:, prompt_BN.shape[1] :]  # type: ignore[no-any-return]

    return model, write


def x_transformers(sizes: Sizes, length: int) -> tuple[nn.Module, Write]:
    """x-transformers with rotary positions, fused attention and its cache."""
    library = importlib.import_module("x_transformers")
    module = library.TransformerWrapper(
        num_tokens=sizes.vocabulary, max_seq_len=length, use_abs_pos_emb=False, attn_layers=x_decoder(library, sizes)
    )
    wrapper = library.AutoregressiveWrapper(module)

    def write(prompt_BN: Tensor, tokens: int) -> Tensor:
        return wrapper.generate(prompt_BN, tokens, temperature=0.0, cache_kv=True)  # type: ignore[no-any-return]

    return wrapper, write


GPT2 = "GPT-2 of transformers"
PEERS = {GPT2: Published("transformers", gpt2), "x-transformers": Published("x-transformers", x_transformers)}
"""By the name that a table gives them; the first is the reference."""
