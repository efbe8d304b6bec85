"""Carry out the notebooks of the documentation, each in a process of its own, and write down what their cells print.

    python tools/notebooks.py              all of docs/notebooks, in place; `make notebooks` does so
    python tools/notebooks.py ONE.ipynb    one of them
    python tools/notebooks.py --print ONE  print what its cells print, and change nothing

Cells are plain Python that prints what there is to see, so that no Jupyter is needed here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def carried_out(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The notebook with numbered cells and what each has printed; an error in a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"{name}, cell {count}", "exec"), names)
        lines = said.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


def printed(notebook: dict[str, Any]) -> str:
    """Printed output of the cells."""
    return "".join(
        line for cell in notebook["cells"] for output in cell.get("outputs", ()) for line in output.get("text", ())
    )


def main(arguments: Sequence[str]) -> int:
    """Carry out one in this process, or each of several in one of its own."""
    only_print = "--print" in arguments
    paths = [Path(word).resolve() for word in arguments if word != "--print"] or sorted(FOLDER.glob("*.ipynb"))
    if len(paths) > 1:
        options = ["--print"] if only_print else []
        return max(subprocess.call([sys.executable, __file__, *options, str(path)]) for path in paths)
    path = paths[0]
    before = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # where cells may leave files
        after = carried_out(before, path.name)
        os.chdir(path.parent)
    if only_print:
        print(printed(after), end="")
    else:
        path.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
