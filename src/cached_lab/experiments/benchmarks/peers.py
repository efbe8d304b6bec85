"""Published implementations of memories, from PyPI, as language models of a given size: what ours are timed beside.

Each is optional; one that is not installed is left out of the table, by name. They are installed with

    pip install --no-deps memorizing-transformers-pytorch recurrent-memory-transformer-pytorch \\
        compressive-transformer-pytorch memformer feedback-transformer-pytorch x-transformers \\
        titans-pytorch infini-transformer-pytorch block-recurrent-transformer-pytorch

and what those import (einops, einops-exts, einx, mogrifier, hyper-connections, torch-einops-utils, loguru, faiss-cpu,
tensordict, assoc-scan, axial-positional-embedding, rotary-embedding-torch).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes shared by all models of one table."""

    vocabulary: int = 256
    width: int = 256
    depth: int = 4
    heads: int = 4
    segment: int = 128
    segments: int = 4
    rows: int = 4
    memory: int = 128
    tokens: int = 8
    store: int = 1024
    neighbours: int = 8
    rate: int = 4
    chunk: int = 16

    @property
    def head_width(self) -> int:
        """E."""
        return self.width // self.heads

    @property
    def usual(self) -> dict[str, int]:
        """The options that most peers call alike."""
        return {"num_tokens": self.vocabulary, "dim": self.width, "depth": self.depth, "heads": self.heads}

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one training step."""
        return self.rows * self.segment * self.segments


class Peer(NamedTuple):
    """A model of others: its module, and how it is called.

    `call(inputs_BN, memory)` gives logits, the memory, not detached, and what else it adds to the loss. One that cuts a
    text into segments itself, and carries nothing beyond it in training, is `whole`: it is given all segments at once.
    """

    module: nn.Module
    call: Callable[[Tensor, Any], Sequence[Any]]
    whole: bool = False

    def read(self, inputs_BN: Tensor, targets_BN: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The mean loss of one segment, and the memory."""
        logits_BNV, memory, *auxiliary = self.call(inputs_BN, memory)
        loss = F.cross_entropy(logits_BNV.flatten(0, 1), targets_BN.flatten())
        return loss + sum(part.sum() for part in auxiliary), memory


def x_decoder(library: Any, sizes: Sizes) -> nn.Module:
    """The layers of x-transformers, with rotary positions and fused attention."""
    return library.Decoder(  # type: ignore[no-any-return]
        dim=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        attn_dim_head=sizes.head_width,
        rotary_pos_emb=True,
        attn_flash=True,
    )


def transformer_xl(sizes: Sizes) -> Peer:
    """x-transformers with its recurrence and rotary positions."""
    library = importlib.import_module("x_transformers")
    module = library.TransformerWrapper(
        num_tokens=sizes.vocabulary,
        max_seq_len=sizes.segment,
        max_mem_len=sizes.memory,
        attn_layers=x_decoder(library, sizes),
    )

    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, mems=memory, return_mems=True))


def compressive(sizes: Sizes) -> Peer:
    """compressive-transformer-pytorch."""
    library = importlib.import_module("compressive_transformer_pytorch")
    module = library.CompressiveTransformer(
        **sizes.usual,
        seq_len=sizes.segment,
        mem_len=sizes.memory,
        cmem_len=sizes.memory // sizes.rate,
        cmem_ratio=sizes.rate,
        gru_gated_residual=False,
    )

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        result: Sequence[Any] = module(inputs_BN, memories=memory)
        # It detaches the weights of keys and values themselves for its own loss, and would train them no more.
        module.requires_grad_(True)
        return result

    return Peer(module, call)


def recurrent_memory(sizes: Sizes) -> Peer:
    """recurrent-memory-transformer-pytorch, without its additions (XL memories)."""
    library = importlib.import_module("recurrent_memory_transformer_pytorch")
    module = library.RecurrentMemoryTransformer(
        **sizes.usual,
        dim_head=sizes.head_width,
        num_memory_tokens=sizes.tokens,
        seq_len=sizes.segment,
        use_flash_attn=True,
        abs_pos_emb=False,
        rotary_pos_emb=True,
        use_xl_memories=False,
    )

    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, memory)[:2])


def memorizing(sizes: Sizes) -> Peer:
    """memorizing-transformers-pytorch, with its faiss store of every row on disk."""
    library = importlib.import_module("memorizing_transformers_pytorch")
    with scratch_folder():  # it makes a folder for its store where it stands
        module = library.MemorizingTransformer(
            **sizes.usual,
            dim_head=sizes.head_width,
            memorizing_layers=sizes.depth - 1,
            max_knn_memories=sizes.store,
            num_retrieved_memories=sizes.neighbours,
            knn_memories_directory=tempfile.mkdtemp(),
        )

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        store = module.create_knn_memories(batch_size=inputs_BN.shape[0]) if memory is None else memory
        return module(inputs_BN, knn_memories=store), store

    return Peer(module, call)


def memformer(sizes: Sizes) -> Peer:
    """memformer's encoder, with a head: it is not causal, which costs it nothing here."""
    library = importlib.import_module("memformer")
    encoder = library.Memformer(
        dim=sizes.width,
        num_memory_slots=sizes.tokens,
        encoder_only=True,
        mem_update_attn_heads=sizes.heads,
        enc_num_tokens=sizes.vocabulary,
        enc_max_seq_len=sizes.segment,
        enc_depth=sizes.depth,
        enc_heads=sizes.heads,
    )
    head = nn.Linear(sizes.width, sizes.vocabulary)

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        hidden_BND, memory = encoder(inputs_BN, mems=memory)[:2]
        return head(hidden_BND), memory

    return Peer(nn.ModuleList([encoder, head]), call)


def feedback(sizes: Sizes) -> Peer:
    """feedback-transformer-pytorch, one token at a time as in the paper."""
    library = importlib.import_module("feedback_transformer_pytorch")
    module = library.FeedbackTransformer(**sizes.usual, dim_head=sizes.head_width, mem_len=sizes.memory, seq_len=1)

    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, memory, return_memory=True))


def titans(sizes: Sizes) -> Peer:
    """titans-pytorch, with one matrix a head in every layer that gates the attention of its segment."""
    library = importlib.import_module("titans_pytorch")
    module = library.MemoryAsContextTransformer(
        **sizes.usual,
        dim_head=sizes.head_width,
        segment_len=sizes.segment,
        neural_memory_segment_len=sizes.chunk,
        neural_memory_batch_size=sizes.segment,  # with its chunks, as ours have it, it soon is not a number
        neural_mem_gate_attn_output=True,
        num_residual_streams=1,
        neural_memory_model=library.MemoryMLP(sizes.head_width, depth=1),
        neural_memory_kwargs={"dim_head": sizes.head_width, "heads": sizes.heads},
    )
    for parameter in module.parameters():  # some share their numbers, which no optimiser takes
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return Peer(module, lambda inputs_BN, memory: (module(inputs_BN), None), whole=True)


def infini(sizes: Sizes) -> Peer:
    """infini-transformer-pytorch, with the delta rule of its paper."""
    library = importlib.import_module("infini_transformer_pytorch")
    module = library.InfiniTransformer(**sizes.usual, dim_head=sizes.head_width, use_mem_delta_rule=True)

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        logits_BNV, _, memory = module(inputs_BN, past_memories=memory, return_new_memories=True)
        return logits_BNV, memory

    return Peer(module, call)


def block_recurrent(sizes: Sizes) -> Peer:
    """block-recurrent-transformer-pytorch, one recurrent layer, as many states, without a window of tokens before."""
    library = importlib.import_module("block_recurrent_transformer_pytorch")
    module = library.BlockRecurrentTransformer(
        **sizes.usual,
        dim_head=sizes.head_width,
        max_seq_len=sizes.segment,
        block_width=sizes.segment,
        num_state_vectors=sizes.segment,
        use_flash_attn=False,
    )

    def call(inputs_BN: Tensor, states: Any) -> Sequence[Any]:
        logits_BNV, _, states = module(inputs_BN, states=states or [], return_memories_and_states=True)
        return logits_BNV, states

    return Peer(module, call)


class Published(NamedTuple):
    """A peer: the distribution that holds it, what builds it, and options with which our model is like it."""

    distribution: str
    build: Callable[[Sizes], Peer]
    like: Mapping[str, Any] = MappingProxyType({})


PEERS: dict[str, Published] = {
    "block_recurrent": Published("block-recurrent-transformer-pytorch", block_recurrent, {"kv_heads": 1}),
    "infini": Published("infini-transformer-pytorch", infini),
    "titans": Published("titans-pytorch", titans),
    "transformer_xl": Published("x-transformers", transformer_xl),
    "compressive": Published("compressive-transformer-pytorch", compressive),
    "rmt": Published("recurrent-memory-transformer-pytorch", recurrent_memory),
    "memorizing": Published("memorizing-transformers-pytorch", memorizing, {"kv_heads": 1}),
    "memformer": Published("memformer", memformer),
    "feedback": Published("feedback-transformer-pytorch", feedback),
}
"""The peer of each of our memories that has one."""


def lacking(distribution: str, error: ImportError) -> str:
    """What is not installed, of a peer that could not be built for it."""
    missing = distribution
    if error.name != distribution.replace("-", "_"):
        missing = f"{error.name}, which {distribution} needs,"
    return f"{missing} is not installed"


def detached(memory: Any) -> Any:
    """The memory of a peer, cut from the graph, whatever it is made of."""
    if isinstance(memory, Tensor):
        return memory.detach()
    if isinstance(memory, tuple) and hasattr(memory, "_fields"):
        return type(memory)(*(detached(part) for part in memory))
    if isinstance(memory, list | tuple) and all(isinstance(m, Tensor | list | tuple) for m in memory):
        return type(memory)(detached(part) for part in memory)
    return memory


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Run in a temporary folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def random_tokens(sizes: Sizes) -> Tensor:
    """(rows, segments * segment + 1) token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.segments * sizes.segment + 1), generator=generator)
