"""Start Python in other processes, as users and torchrun do."""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"


def python(*arguments: object, processes: int = 1, environment: Mapping[str, str] | None = None) -> str:
    """Run `python arguments...`, under torchrun if there are several processes; return its output.

    Args:
        environment: variables that differ from those of this process.

    Raises:
        AssertionError: it failed; with its stderr.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    path = os.pathsep.join([str(SOURCE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def world(function: Callable[..., Any], folder: Path, *arguments: str, processes: int = 2) -> list[Any]:
    """Call `function(world, folder, *arguments)` in processes of torchrun; return its results in order of rank."""
    import torch

    python("-m", "launch", function.__module__, function.__name__, folder, *arguments, processes=processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def _in_process(module: str, function: str, folder: Path, *arguments: str) -> None:
    import torch

    from cached_lab.training.distributed import World, in_world

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(500, exit=True)

    def work(world: World) -> tuple[int, Any]:
        return world.rank, getattr(importlib.import_module(module), function)(world, folder, *arguments)

    rank, found = in_world("cpu", work)
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    _in_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
