"""The `cached` command: one file per subcommand, each with `add_parser(subparsers)` and `run(arguments) -> int`.

`run` returns the exit status. Bad input raises ValueError, a missing file FileNotFoundError, a missing library
ImportError; `main` turns them into messages.
"""
