"""lm_eval's own command line, which knows our models, too: `python -m cached_lab.experiments.harness run`."""

from __future__ import annotations

import os
import sys

from cached_transformers.extras import require

from .language_model import cached_lm


def main() -> int:
    """Run it; bad input ends it with a message and status 2, with CACHED_DEBUG=1 with a traceback."""
    try:
        cached_lm()
        require("lm_eval.__main__", extra="eval").cli_evaluate()
    except (ValueError, ImportError, FileNotFoundError) as error:
        if os.environ.get("CACHED_DEBUG") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
