"""Our models behind lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness, package lm_eval).

    python -m cached_lab.experiments.harness run --model cached --model_args run=runs/x --tasks ...

lm_eval finds the models of its own package alone, and has no entry points, so that this module registers ours and hands
on to its command line. In Python, `CachedLM` is a model as `lm_eval.simple_evaluate(model=...)` takes one.

`CachedLM` comes with the extra `eval`; without it, asking for the class raises an ImportError with the command that
installs it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["cached_lm"]

from .language_model import cached_lm


def __getattr__(name: str) -> Any:
    if name == "CachedLM":
        return cached_lm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
