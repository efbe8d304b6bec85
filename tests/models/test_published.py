"""Our models in a folder and on the hub."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models.test_session import words
from refusals import refuses

from cached_transformers import create_model, load_pretrained, tune_initial_state
from cached_transformers.models import LanguageModel, SequenceClassifier, VisionTransformer
from cached_transformers.models.published import PublishedModel


def language_model(**more: Any) -> LanguageModel:
    torch.manual_seed(0)
    options: dict[str, Any] = {"memory": {"name": "rmt", "length": 3}, "positions": "rotary", **more}
    return LanguageModel(64, width=32, depth=1, heads=2, **options)


def test_saved_it_is_the_same(tmp_path: Path) -> None:
    model = language_model(tied=True).eval()
    model.save_pretrained(tmp_path / "model", results={"perplexity": 3.25})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model"] == "language_model" and config["options"]["memory"] == {"name": "rmt", "length": 3}
    card = (tmp_path / "model" / "README.md").read_text()
    assert "rmt" in card and "| perplexity | 3.25 |" in card and "bytes" in card
    for load in (LanguageModel.from_pretrained, PublishedModel.from_pretrained, load_pretrained):
        again: Any = load(str(tmp_path / "model"))
        assert type(again) is LanguageModel and not again.training
        assert torch.equal(again(words(2, 7)).outputs, model(words(2, 7)).outputs)
        assert again.head.weight is again.embedding.weight
    again.save_pretrained(tmp_path / "again")  # what was loaded can be saved
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "model" / "config.json").read_text()


@pytest.mark.parametrize("first", ["cache_MC", "weight"])
def test_caches_and_dtypes_travel(tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = safetensors.torch.load  # gives the tensors in no order
    monkeypatch.setattr(
        safetensors.torch, "load", lambda file: dict(sorted(load(file).items(), key=lambda t: first not in t[0]))
    )
    model = create_model("vision_transformer", image_size=8, patch_size=4, classes=3, memory="grc", width=16, heads=2)
    x = torch.randn(4, 3, 8, 8)
    model.train()(x)
    model = model.eval().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")  # type: ignore[operator]
    again = VisionTransformer.from_pretrained(tmp_path / "m")
    assert next(again.parameters()).dtype is torch.bfloat16
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    assert any("cache" in name and t.any() for name, t in again.state_dict().items())


def test_copies_know_what_they_were_made_of(tmp_path: Path) -> None:
    model = language_model()
    for number, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        twin.save_pretrained(tmp_path / str(number))
        assert LanguageModel.from_pretrained(tmp_path / str(number)).made_of == model.made_of


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    model = language_model()
    model.stack.blocks[0].attention.output = torch.nn.Linear(32, 32, bias=False)
    refuses(r"output.bias.*32,.*LanguageModel", model.save_pretrained, tmp_path / "a")
    model = language_model()
    tune_initial_state(model, words(1, 6), segment_length=3)
    refuses("save_initial_state", model.save_pretrained, tmp_path / "a")
    model = language_model()
    assert model.made_of is not None
    model.made_of["width"] = torch.zeros(1)
    refuses(r"width=tensor.*config.json", model.save_pretrained, tmp_path / "a")

    class Mine(LanguageModel):
        pass

    refuses("Mine is not registered", Mine(64, width=32, depth=1, heads=2).save_pretrained, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_is_something_else_is_refused(tmp_path: Path) -> None:
    language_model().save_pretrained(tmp_path / "m")
    refuses(r"'language_model'.*SequenceClassifier", SequenceClassifier.from_pretrained, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    refuses("does not match its checksum", LanguageModel.from_pretrained, tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    good = config.read_text()
    for bad, message in (
        ("{", "damaged"),
        ('{"model_type": "gpt2"}', "of another library"),
        (good.replace('"vocabulary": 64', '"vocabulary": "many"'), "vocabulary='many' must be"),
        (good.replace('"vocabulary"', '"vocabular"'), "vocabular"),
    ):
        config.write_text(bad)
        refuses(message, LanguageModel.from_pretrained, tmp_path / "m")
    (tmp_path / "empty").mkdir()
    refuses(r"config\.json", LanguageModel.from_pretrained, tmp_path / "empty")


def test_push_to_hub_uploads_what_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[Any] = []

    class Api:
        def __init__(self, token: Any = None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Repository", (), {"repo_id": repo_id})

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            calls.append((repo_id, sorted(p.name for p in folder_path.iterdir()), options))
            return "done"

    monkeypatch.setattr(hub, "HfApi", Api)
    assert language_model().push_to_hub("me/mine", token="t", revision="r") == "done"
    assert calls == ["t", ("me/mine", ["README.md", "config.json", "model.safetensors"], {"revision": "r"})]
    language_model().save_pretrained(tmp_path / "m")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(tmp_path / "m"))
    assert isinstance(LanguageModel.from_pretrained("me/mine", revision="r"), LanguageModel)
