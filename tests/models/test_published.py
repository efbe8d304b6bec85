"""Our models in a folder and on the hub; models of published sizes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from common import refuses
from models.test_session import words

from cached_lab.resources import recipes_folder
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


WORDS = 267_735
"""Words of WikiText-103's training split, with <unk>, and the end of a line."""


def build(recipe: str) -> Any:
    section = yaml.safe_load((recipes_folder() / f"{recipe}.yaml").read_text(encoding="utf-8"))["model"]
    with torch.device("meta"):
        return create_model(**section, vocabulary=WORDS)


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layer(d: int, f: int) -> int:
    """q, k, v, W_r, W_o without biases; two linear maps with; two norms."""
    return 5 * d * d + 2 * d * f + f + d + 4 * d


def test_transformer_xl_base_has_the_151107538_parameters_of_its_published_log() -> None:
    model = build("lm_wikitext103_xl_base")
    assert count(model) == 151_107_538
    # That log counts the layers apart; it leaves out u and v, 2 x 410 numbers that all layers share.
    assert count(model.stack) - 2 * 410 == 41_066_400 == 16 * layer(410, 2100)


def test_transformer_xl_large_has_285_million_parameters() -> None:
    """No exact number is published; this one follows from the sizes in the published script.

    The 257M of the paper's table are neither all of them nor those of the layers; 16 layers would give 257.9M.
    """
    model = build("lm_wikitext103_xl_large")
    sizes = {1024: 20_000, 256: 20_000, 64: 160_000, 16: WORDS - 200_000}
    words = sum(width * words for width, words in sizes.items())
    projections = sum(1024 * width for width in sizes)
    softmax = WORDS + 3 * 1024 + 3 + 1024 * 1024  # biases, the clusters' own rows, the one projection that is not tied
    layers = 18 * (layer(1024, 4096) + 2 * 1024)  # with u and v of each
    assert count(model) == words + projections + softmax + layers == 285_205_322
    assert layers == count(model.stack) == 245_569_536
    assert words + projections + softmax + layers * 16 // 18 == 257_919_818


@pytest.mark.parametrize("recipe", ["lm_wikitext103_xl_base", "lm_wikitext103_xl_large"])
def test_the_width_of_a_head_and_what_is_tied(recipe: str) -> None:
    model = build(recipe)
    large = recipe.endswith("large")
    assert model.stack.blocks[0].attention.positions.head_width == (64 if large else 41)
    first, last = (model.stack.blocks[i].attention.positions for i in (0, -1))
    assert (first.content_bias is last.content_bias) is not large
    assert all(a is b for a, b in zip(model.head.weights, model.embedding.weights, strict=True))
    tied = [a is b for a, b in zip(model.head.projections, model.embedding.projections, strict=True)]
    assert tied == ([False, True, True, True] if large else [])
