"""Starting Python in processes of its own, as a user or torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


def python(*arguments: object, processes: int = 1, environment: Mapping[str, str] | None = None) -> str:
    """Run `python arguments...`, under torchrun where there are several processes; what it printed.

    Args:
        environment: variables that differ from this process's.

    Raises:
        AssertionError: it failed; with what it wrote to stderr.
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
