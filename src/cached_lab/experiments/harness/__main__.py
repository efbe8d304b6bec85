"""lm_eval's command line with our models: `python -m cached_lab.experiments.harness run`."""

from __future__ import annotations

import os
import sys

from cached_transformers.extras import require


def main() -> int:
    """Run it; bad input gives a message and status 2 (with CACHED_DEBUG=1 a traceback)."""
    try:
        command = require("lm_eval.__main__", extra="eval")
        from . import language_model  # noqa: F401  (registers the model)

        command.cli_evaluate()
    except (ValueError, ImportError, FileNotFoundError) as error:
        if os.environ.get("CACHED_DEBUG") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
