"""Folders of `save_pretrained` with a memory, by transformers' own classes, pipelines and the Hub.

`drills/loading.py` tries many more of these calls at random.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import launch
import pytest
import torch
from integrations import transformers_hosts as T
from integrations.hosts import library

from cached_transformers import add_memory, load_pretrained, remove_memory

AUTO = {"gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}


@pytest.fixture(params=[T.GPT2, T.LLAMA, T.BERT], ids=lambda host: host.name)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[T.Architecture, Any, Path]:
    host: T.Architecture = request.param
    model = T.awaken(host.with_memory()).eval()
    model.save_pretrained(tmp_path / "mine")
    return host, model, tmp_path / "mine"


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}, {"output_hidden_states": True}], ids=str)
def test_every_class_gives_the_host_with_its_memory(saved: Any, options: dict[str, Any]) -> None:
    host, model, folder = saved
    auto, call = getattr(library("transformers"), AUTO[host.name]), T.call_of(host)
    for load in (auto.from_pretrained, type(model).from_pretrained):
        loaded, found = load(folder, output_loading_info=True, **options)
        assert type(loaded) is type(model) and not loaded.training and not any(found.values())
        torch.testing.assert_close(loaded(**call).loss, model(**call).loss)  # eager differs in padding
        assert all(getattr(loaded.config, f"_{key}", getattr(loaded.config, key, 0)) == options[key] for key in options)
    given = auto.from_pretrained(folder, config=host.build().config)
    assert torch.equal(given(**call).logits, model(**call).logits)
    body = library("transformers").AutoModel.from_pretrained(folder)
    assert type(body) is type(model.base_model) and any("memory" in name for name, _ in body.named_parameters())


def test_the_config_of_the_folder_is_the_hosts_with_the_record(saved: Any, tmp_path: Path) -> None:
    host, model, folder = saved
    auto = library("transformers").AutoConfig
    config, own = auto.from_pretrained(folder, num_labels=5), model.config
    assert type(config) is type(own) and config.num_labels == 5 and config.vocab_size == T.VOCABULARY
    assert config.cached_transformers == own.cached_transformers
    config.save_pretrained(tmp_path / "config")
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), auto.from_pretrained(tmp_path / "config")):
        assert again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    with pytest.raises(ValueError, match=rf"config.cached_transformers=.*{type(model).__name__}"):
        type(model)(config)
    fresh = getattr(library("transformers"), AUTO[host.name]).from_config(config)
    assert type(fresh) is type(model) and fresh.state_dict().keys() == model.state_dict().keys()


def test_a_plain_model_that_shares_the_config_is_saved_as_a_plain_model(tmp_path: Path) -> None:
    model = T.awaken(T.GPT2.with_memory())
    plain = type(model)(model.config).eval()
    plain.save_pretrained(tmp_path)
    again, ids = type(model).from_pretrained(tmp_path), T.words(2, 7)
    assert torch.equal(again(ids).logits, plain(ids).logits) and not hasattr(again.config, "cached_transformers")
    assert model.config.cached_transformers["memory"]["name"] == T.GPT2.memory


def test_saved_without_its_memory(saved: tuple[T.Architecture, Any, Path], tmp_path: Path) -> None:
    host, model, folder = saved
    call = T.call_of(host)
    loaded = load_pretrained(str(folder))
    remove_memory(loaded).save_pretrained(tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    assert torch.equal(plain(**call).logits, remove_memory(model)(**call).logits)
    assert not (tmp_path / "plain" / "README.md").exists()


def test_a_memory_in_a_part_of_a_model_is_loaded_there(tmp_path: Path) -> None:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": T.VOCABULARY}, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    model = transformers.CLIPModel(config).eval()
    T.awaken(add_memory(model.vision_model, "grc"))
    model.save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 8, 8)
    for loaded in (load_pretrained(str(tmp_path)), transformers.AutoModel.from_pretrained(tmp_path)):
        assert torch.equal(loaded.vision_model(pixels)[0], model.vision_model(pixels)[0])


def test_a_pipeline_of_the_folder_reads_its_prompt_in_segments(tmp_path: Path) -> None:
    model = T.awaken(add_memory(T.GPT2.build(vocab_size=257), "rmt", length=2, segment_length=4)).eval()
    model.save_pretrained(tmp_path)
    T.byte_tokenizer().save_pretrained(tmp_path)
    writer = library("transformers").pipeline("text-generation", model=str(tmp_path))
    said = writer("a prompt", max_new_tokens=5, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    prompt = torch.tensor([T.byte_tokenizer()("a prompt")["input_ids"]])
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    assert said == expected.tolist()
    assert writer.model.init_memory_state(1) is not None


def test_without_this_package_every_class_refuses_the_folder_and_names_the_package(tmp_path: Path) -> None:
    """A process that has never imported us must not get the host without its memory; imported late, we serve too."""
    T.awaken(T.LLAMA.with_memory()).save_pretrained(tmp_path)
    program = (
        "import sys; sys.modules['torchvision'] = None  # which need not fit torch here\n"
        "import transformers\n"
        "kinds = 'AutoModelForCausalLM LlamaForCausalLM GPT2LMHeadModel AutoConfig LlamaConfig'.split()\n"
        "for kind in kinds:\n"
        "    try: getattr(transformers, kind).from_pretrained(r'%s')\n"
        "    except ValueError as error: print('refused', ' '.join(str(error).split()))\n"
        "import cached_transformers\n"
        "print(hasattr(transformers.LlamaForCausalLM.from_pretrained(r'%s'), 'init_memory_state'))"
    )
    *refused, late = launch.python("-c", program % (tmp_path, tmp_path)).strip().splitlines()[-6:]
    assert all(line.startswith("refused") and "cached_transformers" in line for line in refused)
    assert late == "True"


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_is_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    model = add_memory(T.GPT2.build(), "rmt", length=2, segment_length=4)
    sent: list[str] = []

    def upload(self: Any, folder: Any, *args: Any, **options: Any) -> None:
        sent.append(json.loads((Path(folder) / "config.json").read_text())["model_type"])

    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    for hub in ("huggingface_hub.HfApi.create_repo", "transformers.utils.hub.create_and_tag_model_card"):
        monkeypatch.setattr(hub, MagicMock())
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", MagicMock())
    if way == "push_to_hub":
        model.push_to_hub("mine")
    else:
        model.save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert sent == ["cached_transformers"]
