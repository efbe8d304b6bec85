"""Both packages import with their declared dependencies only; the tests of devices say what they lack."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import needs

SOURCE = Path(__file__).resolve().parents[2] / "src"

# Runs in an interpreter of its own: there, whatever does not belong to a core dependency cannot be found.
PROGRAM = """
import importlib, json, pkgutil, re, sys, sysconfig
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def closure(names):
    found, todo = set(), list(names)
    while todo:
        name = normal(todo.pop())
        if name in found:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another system, by a marker
            continue
        found.add(name)
        todo += [re.match(r"[\\w.-]+", need).group() for need in needs if "extra ==" not in need]
    return found

core = closure(sys.argv[1].split(","))
# A module of the standard library that is named after the machine, which the list of these leaves out.
allowed = set(sys.stdlib_module_names) | {"cached_transformers", "cached_lab", sysconfig._get_sysconfigdata_name()}
allowed |= {top for top, owners in packages_distributions().items() if core & {normal(o) for o in owners}}

class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyCore())
failures, imported = {}, []
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
        imported.append(name)
    except BaseException as error:
        failures[name] = repr(error)
print(json.dumps({"imported": imported, "failures": failures}))
"""


LIBRARY = ("torch", "numpy", "safetensors")
LAB = (*LIBRARY, "pyyaml", "rich", "scipy")


def import_only_with(dependencies: tuple[str, ...], *names: str) -> dict[str, dict[str, str] | list[str]]:
    command = [sys.executable, "-c", PROGRAM, ",".join(dependencies), *names]
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def module_names(package: str) -> list[str]:
    paths = [path.relative_to(SOURCE).with_suffix("") for path in sorted((SOURCE / package).rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    # Importing __main__ runs the command; language_model subclasses a class of lm_eval (extra `eval`).
    return [name for name in names if not name.endswith(("__main__", "harness.language_model"))]


@pytest.mark.parametrize(("package", "dependencies"), [("cached_transformers", LIBRARY), ("cached_lab", LAB)])
def test_every_module_imports_with_the_declared_dependencies(package: str, dependencies: tuple[str, ...]) -> None:
    names = module_names(package)
    result = import_only_with(dependencies, *names)
    assert result["failures"] == {}
    assert result["imported"] == names


def test_the_refusal_is_real() -> None:
    modules = ["timm", "torchvision", "matplotlib", "sklearn", "transformers"]
    failures = {module: f"ModuleNotFoundError(\"No module named '{module}'\")" for module in modules}
    assert import_only_with(LAB, *modules) == {"imported": [], "failures": failures}


def test_the_bare_import_gives_rooms_and_names_and_waits_for_torch() -> None:
    """`import cached_transformers` is lazy; all names resolve in any order, without optional packages."""
    program = (
        "import sys, cached_transformers as c; assert 'torch' not in sys.modules; "
        "assert c.interfaces.__doc__ and c.memories.TransformerXL and c.loops and c.state.save; "
        "import cached_transformers.models.pvt; assert not {'timm', 'torchvision', 'transformers'} & set(sys.modules); "
        "assert 'language_model' in c.MODELS and 'timm' in c.MODELS and 'rmt' in c.MEMORIES; "
        "assert not any(name.startswith('cached_lab') for name in sys.modules); "
        "assert {'create_model', 'add_memory'} <= set(dir(c)); "
        "assert not hasattr(c, 'no_such_room')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PROJECT = Path(__file__).resolve().parents[2]
FIND = importlib.util.find_spec


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These modules cannot be found."""

    def find(name: str, *more: Any) -> Any:
        return None if name in names else FIND(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_what_is_missing_for_devices_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needs.main("cpu") == 0
    without(monkeypatch, "pytest", "yaml", "timm")
    assert needs.main("cpu") == 1
    assert capsys.readouterr().err == "test-gpu lacks: pyyaml, pytest>=8\n"
    without(monkeypatch, "timm")
    assert needs.main("cpu") == 0
    assert capsys.readouterr().out == "timm is not installed: the tests of its models are skipped\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(needs, "version", lambda name: "7.4.0")
    old, gpu = needs.lacking("cuda")
    assert old == "pytest>=8 (here is 7.4.0)" and "DEVICE=cpu" in gpu


def test_every_test_of_devices_is_marked() -> None:
    files = sorted((PROJECT / "tests" / "devices").glob("test_*.py"))
    assert files and all("pytestmark = pytest.mark.device" in file.read_text() for file in files)
    (line,) = re.findall(r"^test-gpu:.*\n(?:\t.*\n)+", (PROJECT / "Makefile").read_text(), re.M)
    assert "install" not in line and "grep -rl --include='test_*.py' 'pytest.mark.device' tests" in line
