"""Lets the files of this folder import each other (pytest's importlib mode does not), and tests in one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
