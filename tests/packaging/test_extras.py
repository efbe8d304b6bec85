"""Optional dependencies: the answers of `require`, and the packages of the extras named in code."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from docs.pages import commands, mentioned

from cached_transformers import extras
from cached_transformers.extras import require

PROJECT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"PIL": "pillow", "faiss": "faiss-cpu", "sklearn": "scikit-learn"}
DISTRIBUTIONS |= {"huggingface_hub": "huggingface-hub", "lm_eval": "lm-eval"}


def project_table() -> dict[str, list[str]]:
    """The extras of pyproject.toml; read by hand, since Python 3.10 has no TOML reader."""
    text = (PROJECT / "pyproject.toml").read_text()
    section = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    assert section is not None
    uncommented = re.sub(r"^#.*$", "", section.group(1), flags=re.M)
    return {k: ast.literal_eval(v) for k, v in re.findall(r"^([\w-]+) = (\[.*?\])$", uncommented, re.M | re.S)}


def installed_by(extra: str) -> set[str]:
    """Distributions that an extra brings, through the extras that it names."""
    found: set[str] = set()
    for requirement in project_table()[extra]:
        nested = re.fullmatch(r"cached-transformers\[(.*)\]", requirement)
        if nested:
            found |= {d for name in nested.group(1).split(",") for d in installed_by(name)}
        else:
            found.add(re.split(r"[<>=!~ ]", requirement)[0].lower())
    return found


def uses() -> list[tuple[str, str, str]]:
    """Every literal `require("module", extra="extra")` of the package: file, module, extra."""
    found = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", "")) != "require":
                continue
            literals = [n.value for n in [*node.args, *(k.value for k in node.keywords)] if isinstance(n, ast.Constant)]
            if len(literals) == 2:
                found.append((path.name, *literals))
    return found


def test_require_gives_the_module_or_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert require("json.decoder", extra="plot") is sys.modules["json.decoder"]
    expected = re.escape('surely_absent is not installed; it comes with: pip install "cached-transformers[vision]"')
    with pytest.raises(ImportError, match=expected) as caught:
        require("surely_absent.inner", extra="vision")
    assert caught.value.name == "surely_absent"
    (tmp_path / "broken_dependency.py").write_text("import something_it_lacks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="'something_it_lacks'"):
        require("broken_dependency", extra="vision")


@pytest.mark.parametrize(("module", "asks"), [("timm", True), ("transformers.models", True), ("matplotlib", False)])
def test_torchvision_is_made_ready_first(module: str, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(extras, "ensure_torchvision", lambda: calls.append("ensured"))
    monkeypatch.setattr(importlib, "import_module", lambda name: calls.append(name))
    require(module, extra="vision")
    assert calls == ["ensured"] * asks + [module]


def test_extras_of_the_code_install_what_it_imports() -> None:
    table = project_table()
    assert {"vision", "language", "detection", "memory", "plot", "logging", "data", "demo", "dev"} <= set(table)
    wrong = []
    for file, module, extra in uses():
        package = module.partition(".")[0]
        if extra not in table or DISTRIBUTIONS.get(package, package).lower() not in installed_by(extra):
            wrong.append(f'{file}: require("{module}", extra="{extra}")')
    assert wrong == []


def test_pip_lines_of_the_pages_name_the_package_and_extras_that_exist() -> None:
    lines = [" ".join(words) for found in (commands("pip"), mentioned("pip")) for _, words in found]
    named = [re.search(r"cached-transformers(?:\[(.*)\])?$", line) for line in lines]
    extras = {extra for found in named if found and found.group(1) for extra in found.group(1).split(",")}
    assert len(lines) > 3 and None not in named and extras and extras - set(project_table()) == set()


def test_nested_extras_are_followed_and_constraints_pin_each() -> None:
    lab = {"filelock", "pyyaml", "rich", "scipy"}
    shown = {"matplotlib", "tensorboard", "scikit-learn", "pillow", "transformers", "gguf", "accelerate"}
    assert lab | shown == installed_by("demo")
    assert {"timm", "torchvision", "transformers", "matplotlib", "tensorboard", "scikit-learn"} <= installed_by("dev")
    lines = (PROJECT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    core = {"torch", "numpy", "safetensors", "pyyaml", "rich", "scipy"}
    named = core | {d for extra in project_table() for d in installed_by(extra)}
    assert named - pinned == set()
