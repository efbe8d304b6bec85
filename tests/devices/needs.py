"""What `make test-gpu` needs and does not find, by name; nothing is installed.

    python tests/devices/needs.py cuda

Exit status 1 where the tests cannot run; of what makes some of them skip it only tells.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version

NEEDED = {
    "torch": "torch>=2.6",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "yaml": "pyyaml",
    "rich": "rich",
    "scipy": "scipy",
    "pytest": "pytest>=8",
}
"""What to install, by the module."""
USED = ("timm", "transformers")


def lacking(device: str) -> list[str]:
    """What has to be there and is not."""
    found = [what for module, what in NEEDED.items() if importlib.util.find_spec(module) is None]
    if "pytest>=8" not in found and int(version("pytest").split(".")[0]) < 8:
        found.append(f"pytest>=8 (here is {version('pytest')})")
    if device == "cuda" and "torch>=2.6" not in found:
        import torch

        if not torch.cuda.is_available():
            found.append(f"a GPU that torch {torch.__version__} sees (DEVICE=cpu runs the same tests without one)")
    return found


def main(device: str) -> int:
    missing = lacking(device)
    if missing:
        print(f"test-gpu lacks: {', '.join(missing)}", file=sys.stderr)
        return 1
    for module in USED:
        if importlib.util.find_spec(module) is None:
            print(f"{module} is not installed: the tests of its models are skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
