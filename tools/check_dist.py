"""Install the wheel of a folder into an empty environment of this Python, and use it as README's reader does.

    python3.13 tools/check_dist.py dist

torch has the version of constraints.txt; all else is the newest that the package allows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    (wheel,) = folder.resolve().glob("*.whl")
    (torch,) = re.findall(r"^torch==\S+", (PROJECT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    first = re.search(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(encoding="utf-8"), re.S)
    assert first is not None
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        venv.create(here / "env", with_pip=True)
        python = here / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"

        def call(*words: object) -> str:
            done = subprocess.run([*map(str, words)], cwd=here, env=clean, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(f"{' '.join(map(str, words))[:200]}\n{done.stdout}{done.stderr}")
            return done.stdout

        call(python, "-m", "pip", "install", "-q", torch, wheel)
        used = "import cached_transformers as c; c.GRCAttention(8, 2, length=4); print(c.__version__)"
        version = call(python, "-c", used)
        call(python, "-m", "pip", "install", "-q", torch, f"{wheel}[lab,language]")
        (here / "first.py").write_text(first[1], encoding="utf-8")
        printed = [line.strip() for line in call(python, "first.py").splitlines()]
        wanted = re.findall(r"# -> (.*)", first[1])
        if printed != wanted:
            sys.exit(f"README's first block printed {printed}, not {wanted}")
        listed = call(python.with_name("cached"), "list")
        installed = call(python, "-m", "pip", "list", "--format=freeze").split()
    named = ", ".join(x for x in installed if x.startswith(("torch==", "transformers==", "numpy==")))
    print(f"Python {sys.version.split()[0]}, {named}: cached-transformers {version.strip()}; README's first block and")
    print(f"`cached list` ({len(listed.splitlines())} lines) work")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
