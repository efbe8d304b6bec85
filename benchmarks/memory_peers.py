"""Published implementations of memories, from PyPI, as language models of a given size.

Each is optional; a table names those that are not installed. They are installed with

    pip install --no-deps memorizing-transformers-pytorch recurrent-memory-transformer-pytorch \\
        compressive-transformer-pytorch memformer feedback-transformer-pytorch x-transformers \\
        titans-pytorch infini-transformer-pytorch block-recurrent-transformer-pytorch

and their own imports (einops, einops-exts, einx, mogrifier, hyper-connections, torch-einops-utils, loguru, faiss-cpu,
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
class ModelSizes:
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
        return self.width // self.heads

    @property
    def usual(self) -> dict[str, int]:
        """The options that most peers name alike."""
        return {"num_tokens": self.vocabulary, "dim": self.width, "depth": self.depth, "heads": self.heads}


class Peer(NamedTuple):
    """A published model and its call.

    `call(inputs_BN, memory)` returns logits, the memory (not detached) and terms added to the loss. A `whole` peer
    splits a text into segments itself and carries nothing between calls: it gets all segments at once.
    """

    module: nn.Module
    call: Callable[[Tensor, Any], Sequence[Any]]
    whole: bool = False

    def loss(self, inputs_BN: Tensor, targets_BN: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Return the mean loss of one segment, and the memory."""
        logits_BNV, memory, *auxiliary = self.call(inputs_BN, memory)
        loss = F.cross_entropy(logits_BNV.flatten(0, 1), targets_BN.flatten())
        return loss + sum(part.sum() for part in auxiliary), memory


def x_decoder(library: Any, s: ModelSizes) -> nn.Module:
    """Layers of x-transformers, with rotary positions and fused attention."""
    sizes = {"dim": s.width, "depth": s.depth, "heads": s.heads, "attn_dim_head": s.head_width}
    return library.Decoder(**sizes, rotary_pos_emb=True, attn_flash=True)  # type: ignore[no-any-return]


def transformer_xl(s: ModelSizes) -> Peer:
    """x-transformers with its recurrence and rotary positions."""
    library = importlib.import_module("x_transformers")
    lengths = {"max_seq_len": s.segment, "max_mem_len": s.memory}
    module = library.TransformerWrapper(num_tokens=s.vocabulary, **lengths, attn_layers=x_decoder(library, s))
    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, mems=memory, return_mems=True))


def compressive(s: ModelSizes) -> Peer:
    """compressive-transformer-pytorch."""
    lengths = {"seq_len": s.segment, "mem_len": s.memory, "cmem_len": s.memory // s.rate, "cmem_ratio": s.rate}
    library = importlib.import_module("compressive_transformer_pytorch")
    module = library.CompressiveTransformer(**s.usual, **lengths, gru_gated_residual=False)

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        result: Sequence[Any] = module(inputs_BN, memories=memory)
        module.requires_grad_(True)  # it switches the gradient of keys and values off for its own loss, and not on
        return result

    return Peer(module, call)


def recurrent_memory(s: ModelSizes) -> Peer:
    """recurrent-memory-transformer-pytorch, without its additions (XL memories)."""
    sizes = {**s.usual, "dim_head": s.head_width, "num_memory_tokens": s.tokens, "seq_len": s.segment}
    options = {"use_flash_attn": True, "abs_pos_emb": False, "rotary_pos_emb": True, "use_xl_memories": False}
    library = importlib.import_module("recurrent_memory_transformer_pytorch")
    module = library.RecurrentMemoryTransformer(**sizes, **options)
    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, memory)[:2])


def memorizing(s: ModelSizes) -> Peer:
    """memorizing-transformers-pytorch, with a faiss store per row on disk."""
    store = {"max_knn_memories": s.store, "num_retrieved_memories": s.neighbours}
    library = importlib.import_module("memorizing_transformers_pytorch")
    with scratch_folder():  # it makes the folder of its store in the working folder
        where = {"memorizing_layers": s.depth - 1, "knn_memories_directory": tempfile.mkdtemp()}
        module = library.MemorizingTransformer(**s.usual, dim_head=s.head_width, **store, **where)

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        store = module.create_knn_memories(batch_size=inputs_BN.shape[0]) if memory is None else memory
        return module(inputs_BN, knn_memories=store), store

    return Peer(module, call)


def memformer(s: ModelSizes) -> Peer:
    """memformer's encoder with a head; it is not causal, which costs no time here."""
    encoder = importlib.import_module("memformer").Memformer(
        dim=s.width,
        num_memory_slots=s.tokens,
        encoder_only=True,
        mem_update_attn_heads=s.heads,
        enc_num_tokens=s.vocabulary,
        enc_max_seq_len=s.segment,
        enc_depth=s.depth,
        enc_heads=s.heads,
    )
    head = nn.Linear(s.width, s.vocabulary)

    def call(inputs_BN: Tensor, memory: Any) -> Sequence[Any]:
        hidden_BND, memory = encoder(inputs_BN, mems=memory)[:2]
        return head(hidden_BND), memory

    return Peer(nn.ModuleList([encoder, head]), call)


def feedback(s: ModelSizes) -> Peer:
    """feedback-transformer-pytorch, one token at a time as in the paper."""
    library = importlib.import_module("feedback_transformer_pytorch")
    module = library.FeedbackTransformer(**s.usual, dim_head=s.head_width, mem_len=s.memory, seq_len=1)
    return Peer(module, lambda inputs_BN, memory: module(inputs_BN, memory, return_memory=True))


def titans(s: ModelSizes) -> Peer:
    """titans-pytorch, with one matrix per head in every layer, which gates the attention of its segment."""
    library = importlib.import_module("titans_pytorch")
    module = library.MemoryAsContextTransformer(
        **s.usual,
        dim_head=s.head_width,
        segment_len=s.segment,
        neural_memory_segment_len=s.chunk,
        neural_memory_batch_size=s.segment,  # with chunks as ours it soon is NaN
        neural_mem_gate_attn_output=True,
        num_residual_streams=1,
        neural_memory_model=library.MemoryMLP(s.head_width, depth=1),
        neural_memory_kwargs={"dim_head": s.head_width, "heads": s.heads},
    )
    for parameter in module.parameters():  # some share storage, which no optimiser accepts
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return Peer(module, lambda inputs_BN, memory: (module(inputs_BN), None), whole=True)


def infini(s: ModelSizes) -> Peer:
    """infini-transformer-pytorch, with the delta rule of its paper."""
    library = importlib.import_module("infini_transformer_pytorch")
    module = library.InfiniTransformer(**s.usual, dim_head=s.head_width, use_mem_delta_rule=True)
    return Peer(module, lambda ids, memory: module(ids, past_memories=memory, return_new_memories=True)[::2])


def block_recurrent(s: ModelSizes) -> Peer:
    """block-recurrent-transformer-pytorch, with one recurrent layer and no window of earlier tokens."""
    lengths = {"max_seq_len": s.segment, "block_width": s.segment, "num_state_vectors": s.segment}
    library = importlib.import_module("block_recurrent_transformer_pytorch")
    module = library.BlockRecurrentTransformer(**s.usual, dim_head=s.head_width, **lengths, use_flash_attn=False)
    return Peer(module, lambda ids, states: module(ids, states=states or [], return_memories_and_states=True)[::2])


class PublishedMemory(NamedTuple):
    """A peer: its distribution, its builder, and options that make our model like it."""

    distribution: str
    build: Callable[[ModelSizes], Peer]
    like: Mapping[str, Any] = MappingProxyType({})


PEERS: dict[str, PublishedMemory] = {
    "block_recurrent": PublishedMemory("block-recurrent-transformer-pytorch", block_recurrent, {"kv_heads": 1}),
    "infini": PublishedMemory("infini-transformer-pytorch", infini),
    "titans": PublishedMemory("titans-pytorch", titans),
    "transformer_xl": PublishedMemory("x-transformers", transformer_xl),
    "compressive": PublishedMemory("compressive-transformer-pytorch", compressive),
    "rmt": PublishedMemory("recurrent-memory-transformer-pytorch", recurrent_memory),
    "memorizing": PublishedMemory("memorizing-transformers-pytorch", memorizing, {"kv_heads": 1}),
    "memformer": PublishedMemory("memformer", memformer),
    "feedback": PublishedMemory("feedback-transformer-pytorch", feedback),
}
"""The peers of our memories, by name."""


def lacking(distribution: str, error: ImportError) -> str:
    """Name the distribution, or the import of it, that is not installed."""
    if error.name == distribution.replace("-", "_"):
        return f"{distribution} is not installed"
    return f"{error.name}, which {distribution} needs, is not installed"


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Work in a temporary folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
