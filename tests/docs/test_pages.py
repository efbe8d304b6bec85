"""The Python of the README and the pages runs as it stands there, and the pages name what there is."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from docs.pages import BLOCK, PROJECT, TEXTS, Block, blocks
from integrations.hosts import library
from integrations.transformers_hosts import byte_tokenizer

CONTINUED = "examples of this page go on from one another"
"""What a page says whose blocks share their names; any other block runs alone."""
OURS = re.compile(r"^\s*(?:from|import) cached_(?:transformers|lab)", re.MULTILINE)
OTHERS = re.compile(r"^\s*(?:from|import) (?:timm|torchvision|transformers|peft|accelerate|lightning)\b", re.MULTILINE)

BLOCKS = list(blocks("python"))
RUN = [block for block in BLOCKS if not block.not_run]
PAGES = list(dict.fromkeys(block.page for block in RUN))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder; and small models of random weights in the place of those that would be fetched."""
    transformers = library("transformers")
    bart = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    bart |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    llama = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama |= {"intermediate_size": 16, "vocab_size": 300}
    sizes: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300),
        "meta-llama/Llama-3.2-1B": lambda: transformers.LlamaConfig(**llama),
        "HuggingFaceTB/SmolLM2-135M-Instruct": lambda: transformers.LlamaConfig(**llama),
        "facebook/bart-base": lambda: transformers.BartConfig(**bart, vocab_size=300),
    }
    load = transformers.PreTrainedModel.from_pretrained.__func__
    load_tokenizer = transformers.AutoTokenizer.from_pretrained.__func__

    def from_pretrained(cls: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name not in sizes:
            return load(cls, name, *arguments, **options)
        assert not (arguments or options)
        return cls(sizes[name]())

    def tokenizer(cls: Any, name: str, *arguments: Any, **options: Any) -> Any:
        return byte_tokenizer() if name in sizes else load_tokenizer(cls, name, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", classmethod(tokenizer))
    monkeypatch.chdir(tmp_path)


def old_classifier() -> None:
    """The file that docs/backbones.md loads as one that the reader has trained."""
    import timm

    import cached_transformers.integrations.timm.timm_models  # noqa: F401

    torch.save(timm.create_model("pvt_tiny_grc").state_dict(), "cached.pth")


def a_book() -> None:
    """The text that docs/language-modelling.md reads."""
    Path("book.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")


PREPARED: dict[str, Callable[[], None]] = {"docs/backbones.md": old_classifier, "docs/language-modelling.md": a_book}
"""Pages that read files of the reader's, and what writes such files."""


PRINTED = re.compile(r"# -> (.*)$", re.MULTILINE)
"""Comment after a `print` with the line that it prints."""


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block and compare printed lines with its comments; a traceback says page and line."""
    source = "\n" * (block.line - 1) + block.text
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, block.page, "exec"), names)
    if shown := PRINTED.findall(block.text):
        assert output.getvalue().splitlines() == shown


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: str) -> None:
    """In one process; with the names of the blocks before it where the page says so."""
    goes_on = CONTINUED in " ".join(TEXTS[page].split())
    PREPARED.get(page, lambda: None)()
    names: dict[str, Any] = {"__name__": "page"}
    for block in RUN:
        if block.page == page:
            names = names if goes_on else {"__name__": "page"}
            run(block, names)


@pytest.mark.usefixtures("published")
@pytest.mark.filterwarnings("ignore")  # of lightning's own, which depend on the machine
def test_the_block_for_lightning_runs_where_it_is_installed() -> None:
    pytest.importorskip("lightning")
    (block,) = (block for block in BLOCKS if "import lightning" in block.text)
    run(block, {"__name__": "page"})


def test_links_and_reasons_lead_to_files() -> None:
    reasons = [block.not_run for block in BLOCKS if block.not_run]
    assert len(reasons) <= 5 and [path for path in reasons if not (PROJECT / path).is_file()] == []
    wrong = []
    for page, text in TEXTS.items():
        links = re.findall(r"\]\((?!https?://)([^)#\s]+)[^)]*\)", BLOCK.sub("", text))
        wrong += [f"{page}: {link}" for link in links if not ((PROJECT / page).parent / link).exists()]
    assert wrong == [] and "](docs/images/grc.svg)" in TEXTS["README.md"]


def test_ours_is_imported_before_what_needs_torchvision() -> None:
    """Beside a torchvision that does not fit its torch the other order ends in an error of torchvision's."""
    wrong = []
    for block in BLOCKS:
        ours, other = OURS.search(block.text), OTHERS.search(block.text)
        if ours and other and other.start() < ours.start():
            wrong.append(block.name)
    assert wrong == []


FIRSTS = [block for block in RUN if block.number == 1 and "from_pretrained(" not in block.text]
"""What can run as the first thing of a process without weights of others; the README's does so in the fast tests."""


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name, marks=[pytest.mark.slow] if b.page != "README.md" else []) for b in FIRSTS]
)
def test_the_first_block_runs_in_a_new_process(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARED.get(block.page, lambda: None)()
    Path("block.py").write_text(block.text, encoding="utf-8")
    launch.python("-W", "ignore", "block.py")


@pytest.mark.parametrize("page", TEXTS)
def test_pages_name_files_and_modules_that_exist(page: str) -> None:
    """Files by their path in the repository or in the package; modules where an example imports from them."""
    packages = [PROJECT / "src" / "cached_transformers", PROJECT / "src" / "cached_lab"]
    files = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|yaml))`", TEXTS[page])
    roots = [PROJECT, PROJECT / "src", *packages]
    assert [name for name in files if not any((root / name).exists() for root in roots)] == []
    modules = re.findall(r"^\s*(?:from|import) (cached_(?:transformers|lab)[\w.]*)", TEXTS[page], re.MULTILINE)
    places = {name: PROJECT / "src" / name.replace(".", "/") for name in modules}
    assert [name for name, at in places.items() if not at.is_dir() and not at.with_suffix(".py").is_file()] == []
