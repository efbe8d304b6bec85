"""Old calls of docs/coming_from.md run in the libraries that have them (`make test-peers` installs most)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cached_transformers import create_model

pytestmark = pytest.mark.peers
SIZES = {"num_tokens": 32, "dim": 16, "depth": 2, "heads": 2}
IDS = torch.arange(16).reshape(2, 8)


def ours(memory: Any) -> torch.Size:
    """Shape of the logits of the new call, after two segments."""
    net = create_model("language_model", vocabulary=32, width=16, depth=2, heads=2, feed_forward=16, memory=memory)
    return net(IDS, net(IDS).state).outputs.shape


def test_recurrent_memory_transformer() -> None:
    library = pytest.importorskip("recurrent_memory_transformer_pytorch")
    options = {"num_memory_tokens": 4, "seq_len": 8, "causal": True}
    model = library.RecurrentMemoryTransformer(**SIZES, **options, use_xl_memories=True)
    logits, memory, xl = model(IDS)
    logits, memory, xl = model(IDS, memory, xl_memories=xl)
    assert logits.shape == ours({"name": "rmt", "length": 4}) == ours(["rmt", "transformer_xl"])
    loss = library.RecurrentMemoryTransformerWrapper(model)(IDS.repeat(1, 3), memory_replay_backprop=True)
    assert loss > 0 and xl and memory.shape == (2, 4, 16)


def test_memorizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("memorizing_transformers_pytorch")
    monkeypatch.chdir(tmp_path)
    model = library.MemorizingTransformer(**SIZES, memorizing_layers=2, max_knn_memories=64, num_retrieved_memories=4)
    model(IDS, knn_memories=(store := model.create_knn_memories(batch_size=2)))
    logits = model(IDS, knn_memories=store, add_knn_memory=False)
    assert logits.shape == ours({"name": "memorizing", "length": 64, "k": 4})


def test_titans() -> None:
    library = pytest.importorskip("titans_pytorch")
    retrieved, _ = library.NeuralMemory(dim=16, chunk_size=4)(torch.randn(2, 8, 16))
    model = library.MemoryAsContextTransformer(**SIZES, segment_len=8, num_persist_mem_tokens=4)
    assert retrieved.shape == (2, 8, 16) and model(IDS).shape == ours("titans")


def test_infini() -> None:
    library = pytest.importorskip("infini_transformer_pytorch")
    model = library.InfiniTransformer(**SIZES, use_mem_delta_rule=True)
    memories = model(IDS, return_new_memories=True)[-1]
    logits = model(IDS, past_memories=memories, return_new_memories=True)[0]
    assert logits.shape == ours({"name": "infini", "update": "delta"})
    wrapper = library.InfiniTransformerWrapper(model, segment_length=4, detach_mems_every_num_segments=2)
    assert wrapper(IDS, backward=True) > 0


def test_x_transformers() -> None:
    library = pytest.importorskip("x_transformers")
    layers = library.Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True)
    model = library.TransformerWrapper(num_tokens=32, max_seq_len=8, max_mem_len=8, attn_layers=layers)
    _, memories = model(IDS, return_mems=True)
    logits, _ = model(IDS, mems=memories, return_mems=True)
    assert logits.shape == ours({"name": "transformer_xl", "length": 8})
    assert library.XLAutoregressiveWrapper(model)(IDS) > 0
