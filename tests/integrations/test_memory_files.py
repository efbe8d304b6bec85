"""A memory trained alone: files of it, and hosts that are frozen around it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from common import refuses
from peft import IA3Config, get_peft_model
from real_weights import glass, glass_folder, glass_ids
from torch import nn
from torch.ao.quantization import quantize_dynamic

from cached_transformers import add_memory, create_model, load_memory, save_memory
from cached_transformers.integrations.frozen_host import host_digest

SEGMENT = 16
MEMORIES: dict[str, dict[str, Any]] = {
    "ahn": {"name": "ahn", "length": 8, "relative": False},
    "rmt": {"name": "rmt", "length": 2},
    "grc_stream": {"name": "grc_stream", "length": 8},
}


def trained(memory: str) -> Any:
    """The Llama of glassllm with a memory whose weights were moved."""
    torch.manual_seed(1)
    model = add_memory(glass()[0], MEMORIES[memory], segment_length=SEGMENT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memory" in name.split("."):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([glass_ids(3 * SEGMENT)])).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_is_saved_without_its_host_and_loads_on_it(memory: str, tmp_path: Path) -> None:
    model, path = trained(memory), tmp_path / "memory.safetensors"
    save_memory(model, path)
    assert path.stat().st_size < sum(p.nbytes for n, p in model.named_parameters() if "memory" in n.split(".")) + 65536
    host = glass()[0].eval()
    assert load_memory(host, path) is host
    assert torch.equal(logits(host), logits(model))
    fresh = add_memory(glass()[0], MEMORIES[memory], segment_length=SEGMENT).eval()
    assert not torch.equal(logits(fresh), logits(model))  # the weights of the file matter
    half = load_memory(glass(torch.bfloat16)[0], path)  # the same host, rounded
    assert half.dtype == torch.bfloat16


def test_files_are_refused_by_other_hosts(tmp_path: Path) -> None:
    model, path = trained("ahn"), tmp_path / "memory.safetensors"
    save_memory(model, path)
    moved, fewer = glass()[0], glass()[0]
    with torch.no_grad():
        moved.lm_head.weight[0, 0] += 1
    fewer.model.layers, fewer.config.num_hidden_layers = fewer.model.layers[:2], 2
    refuses("digest", load_memory, moved, path)
    refuses("layers=4", load_memory, fewer, path)
    refuses("memory", load_memory, trained("ahn"), path)  # it has one
    refuses("Linear", load_memory, nn.Linear(2, 2), path)
    for host in (moved, fewer):
        refuses("memory", save_memory, host, path)  # it has none, not even after the error


def test_damaged_files_and_adapters_are_refused(tmp_path: Path) -> None:
    model, path = trained("ahn"), tmp_path / "memory.safetensors"
    save_memory(model, path)
    content, host = path.read_bytes(), glass()[0]
    refuses("path", load_memory, host, tmp_path / "none")
    path.write_bytes(content[:200])
    refuses("path", load_memory, host, path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    refuses("path", load_memory, host, path)
    adapted = create_model("transformers", pretrained=str(glass_folder()), memory="ahn", trained="memory", lora=2)
    refuses("q_proj", save_memory, adapted, path)
    other = get_peft_model(trained("ahn"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    refuses("k_proj", save_memory, other, path)


def test_hosts_whose_weights_are_not_at_hand_are_refused_by_name(tmp_path: Path) -> None:
    quantised = quantize_dynamic(trained("ahn"), {nn.Linear}, dtype=torch.qint8)
    refuses("quantised", save_memory, quantised, tmp_path / "memory.safetensors")
    with torch.device("meta"):
        refuses("pretrained", create_model, "transformers", vocabulary=64, memory="grc_stream", trained="memory")


def test_a_frozen_host_is_not_stored_and_must_be_the_same() -> None:
    build = {"pretrained": str(glass_folder()), "memory": MEMORIES["ahn"], "trained": "memory", "dtype": "bfloat16"}
    model = create_model("transformers", **build, lora=2)
    stored = model.state_dict()
    assert all("memory" in name or "lora_" in name or name == "host_digest" for name in stored)
    assert all(t.dtype == torch.float32 for name, t in stored.items() if name != "host_digest")
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains and all("memory" in name or "lora_" in name for name in trains)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in trains:
                p.add_(0.05)
    ids, other = torch.tensor([glass_ids(SEGMENT)]), create_model("transformers", **build, lora=2)
    assert not torch.equal(other(ids).outputs, model(ids).outputs)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids).outputs, model(ids).outputs)
    copied = copy.deepcopy(model)
    assert copied.state_dict().keys() == stored.keys()
    wrong = {**stored, "host_digest": stored["host_digest"] + 1}
    refuses("digest", other.load_state_dict, wrong)
    assert torch.equal(host_digest(glass()[0]), stored["host_digest"])


def test_there_must_be_something_to_train() -> None:
    given = {"pretrained": str(glass_folder())}
    refuses("memory", create_model, "transformers", **given, trained="memory")
    refuses("memory", create_model, "transformers", **given, memory="streaming_llm", trained="memory")
    refuses("lora=-1", create_model, "transformers", **given, trained="memory", lora=-1)
    refuses("lora=2", create_model, "transformers", **given, lora=2)
    create_model("transformers", **given, trained="memory", lora=2)  # adapters only
