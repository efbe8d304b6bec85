"""Every module of the package imports with the core dependencies alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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

core = closure(["torch", "numpy", "safetensors", "pyyaml", "rich", "scipy"])
# A module of the standard library that is named after the machine, which the list of these leaves out.
allowed = set(sys.stdlib_module_names) | {"cached_transformers", sysconfig._get_sysconfigdata_name()}
allowed |= {top for top, owners in packages_distributions().items() if core & {normal(o) for o in owners}}

class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyCore())
failures, imported = {}, []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        imported.append(name)
    except BaseException as error:
        failures[name] = repr(error)
print(json.dumps({"imported": imported, "failures": failures}))
"""


def import_with_core_only(*names: str) -> dict[str, dict[str, str] | list[str]]:
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def module_names() -> list[str]:
    paths = [path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]  # importing that one runs the command


def test_every_module_imports_with_core_dependencies_only() -> None:
    names = module_names()
    result = import_with_core_only(*names)
    assert result["failures"] == {}
    assert result["imported"] == names


def test_the_refusal_is_real() -> None:
    modules = ["timm", "torchvision", "matplotlib", "sklearn", "transformers"]
    failures = {module: f"ModuleNotFoundError(\"No module named '{module}'\")" for module in modules}
    assert import_with_core_only(*modules) == {"imported": [], "failures": failures}


def test_the_bare_import_gives_rooms_and_names_and_waits_for_torch() -> None:
    """`import cached_transformers` is lazy; what hangs below it is there when it is asked for, in any order, without
    what is optional, installed or not."""
    program = (
        "import sys, cached_transformers as c; assert 'torch' not in sys.modules; "
        "assert c.seam.__doc__ and c.memories.TransformerXL and c.training and c.state.save; "
        "import cached_transformers.models.pvt; assert not {'timm', 'torchvision', 'transformers'} & set(sys.modules); "
        "assert 'mask_rcnn' in c.MODELS and 'timm' in c.MODELS and 'digits' in c.DATASETS and 'rmt' in c.MEMORIES; "
        "assert {'create_model', 'add_memory'} <= set(dir(c)); "
        "assert not hasattr(c, 'no_such_room')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
