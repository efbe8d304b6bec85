"""The `cached` command: one file per subcommand, each with `add_parser(subparsers)` and `run(arguments) -> int`.

`run` prints or writes what was asked for and returns the exit status. Bad input is a ValueError, a missing file a
FileNotFoundError, a missing library an ImportError, of which `main` makes messages.
"""

from __future__ import annotations
