"""The `cached` command: one file per subcommand, with `ARGUMENTS` and `run(arguments) -> int`, the exit status.

Bad input raises ValueError, a missing file FileNotFoundError, a missing library ImportError; `main` turns them into
messages.
"""
