"""The `cached` command: one file per subcommand, each with `add_parser(subparsers)` and `run(arguments) -> int`."""

from __future__ import annotations
