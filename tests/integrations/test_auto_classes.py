"""Folders of `save_pretrained` with a memory, in transformers' own ways: Auto classes, pipelines, the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from integrations.hosts import library
from integrations.transformers_hosts import BERT, GPT2, LLAMA, VOCABULARY, Architecture, awaken, call_of

from cached_transformers import add_memory, load_pretrained, remove_memory

AUTO = {"gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}


@pytest.fixture(params=[GPT2, LLAMA, BERT], ids=lambda host: host.name)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Architecture, Any, Path]:
    host: Architecture = request.param
    model = awaken(host.with_memory()).eval()
    model.save_pretrained(tmp_path / "mine")
    return host, model, tmp_path / "mine"


@pytest.mark.filterwarnings("ignore:.*(not used by|not stored, and)")  # heads, where the body alone is asked for
def test_auto_classes_give_the_host_with_its_memory(saved: tuple[Architecture, Any, Path]) -> None:
    host, model, folder = saved
    transformers = library("transformers")
    loaded = getattr(transformers, AUTO[host.name]).from_pretrained(folder)
    call = call_of(host)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(**call).logits, model(**call).logits)
    body = transformers.AutoModel.from_pretrained(folder)
    assert type(body) is type(model.base_model) and any("memory" in name for name, _ in body.named_parameters())
    config = transformers.AutoConfig.from_pretrained(folder)
    fresh = getattr(transformers, AUTO[host.name]).from_config(config)
    assert type(fresh) is type(model) and fresh.config.cached_transformers == model.config.cached_transformers


def test_saved_again_and_without_its_memory(saved: tuple[Architecture, Any, Path], tmp_path: Path) -> None:
    host, model, folder = saved
    call = call_of(host)
    loaded = load_pretrained(str(folder))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load_pretrained(str(tmp_path / "again"))(**call).logits, model(**call).logits)
    remove_memory(loaded).save_pretrained(tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    assert torch.equal(plain(**call).logits, remove_memory(model)(**call).logits)
    assert not (tmp_path / "plain" / "README.md").exists()


def test_a_pipeline_of_the_folder_reads_its_prompt_in_segments(tmp_path: Path) -> None:
    transformers, tokenizers = library("transformers"), library("tokenizers")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    words_alone = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words_alone.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words_alone, pad_token="w0").save_pretrained(tmp_path)
    model = awaken(add_memory(GPT2.build(), "rmt", length=2, segment_length=4)).eval()
    model.save_pretrained(tmp_path)
    writer = transformers.pipeline("text-generation", model=str(tmp_path))
    text = "w3 w1 w4 w1 w5 w9 w2"
    said = writer(text, max_new_tokens=5, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
    assert said == expected.tolist()
    assert writer.model.init_memory_state(1) is not None


def test_without_this_package_the_folder_is_refused_by_its_name_and_with_it_loads(tmp_path: Path) -> None:
    """A process that has never imported us must not get the host without its memory; imported late, we serve too."""
    awaken(GPT2.with_memory()).save_pretrained(tmp_path)
    program = (
        "import sys; sys.modules['torchvision'] = None  # which need not fit torch here\n"
        "import transformers\n"
        "for kind in (transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel):\n"
        "    try: kind.from_pretrained(r'%s')\n"
        "    except Exception as error: print(type(error).__name__, ' '.join(str(error).split()))\n"
        "import cached_transformers\n"
        "print(hasattr(transformers.AutoModelForCausalLM.from_pretrained(r'%s'), 'init_memory_state'))"
    )
    auto, named, late = launch.python("-c", program % (tmp_path, tmp_path)).strip().splitlines()[-3:]
    assert "model type `cached_transformers`" in auto
    assert "size mismatch" in named or "mismatched" in named
    assert late == "True"


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_is_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    sent: dict[str, Any] = {}
    model = add_memory(GPT2.build(), "rmt", length=2, segment_length=4)

    def push(self: Any, repo_id: str, **options: Any) -> None:
        self.save_pretrained(tmp_path / "pushed")
        sent.update(repo_id=repo_id, **options)

    monkeypatch.setattr(type(model), "push_to_hub", push)
    if way == "push_to_hub":
        model.push_to_hub("mine")
    else:
        model.save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert sent == {"repo_id": "mine"}
    assert json.loads((tmp_path / "pushed" / "config.json").read_text())["model_type"] == "cached_transformers"


def test_an_auto_class_that_has_nothing_for_the_host_says_so(tmp_path: Path) -> None:
    transformers = library("transformers")
    awaken(GPT2.with_memory()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"AutoModelForMaskedLM.*'gpt2'.*HeadModel"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
