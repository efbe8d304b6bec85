"""Our models in lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness, package lm_eval).

    python -m cached_lab.experiments.harness run --model cached --model_args run=runs/x --tasks ...

lm_eval finds only models of its own package and has no entry points, so this command registers ours and then runs
lm_eval's command line. In Python, `CachedLM` is a model for `lm_eval.simple_evaluate(model=...)`. Both need the extra
`eval`.
"""

from typing import Any

from cached_transformers.extras import require


def __getattr__(name: str) -> Any:
    if name == "CachedLM":
        require("lm_eval", extra="eval")
        from .language_model import CachedLM

        return CachedLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
