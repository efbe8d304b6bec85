"""Write the facts of all parts into `facts.json`, so that the command line can name them without importing torch.

`make facts` runs `python -m cached_lab.experiments.facts`.
"""

from __future__ import annotations

import json
from typing import Any

import cached_lab.experiments.probes
import cached_lab.tasks  # noqa: F401
import cached_transformers.attentions
import cached_transformers.integrations.models
import cached_transformers.memories  # noqa: F401
from cached_lab.registries import LISTED
from cached_lab.resources import facts_file

from .reproductions import MEASURED, REPRODUCTIONS

PACKAGES = ("cached_transformers", "cached_lab")


def registry_facts() -> dict[str, list[dict[str, Any]]]:
    """Return facts of our own parts (`Entry.facts`), by the kinds of `LISTED`, sorted by name."""
    return {
        kind: [entry.facts() for entry in registry if entry.factory.__module__.partition(".")[0] in PACKAGES]
        for kind, registry in LISTED.items()
    }


def as_text() -> str:
    """Return the current content of `facts.json`."""
    summaries = {name: table.summary for name, table in REPRODUCTIONS.items()} | MEASURED
    tables = [{"name": name, "summary": summary} for name, summary in sorted(summaries.items())]
    facts = {**registry_facts(), "reproductions": tables}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    facts_file().write_text(as_text(), encoding="utf-8")
    print(f"written: {facts_file()}")
