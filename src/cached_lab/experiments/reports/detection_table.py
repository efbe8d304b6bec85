"""Average precisions of a detector as a table of a run's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .formatting import Metric
from .page import Block, Row, Table, titled

COLUMNS = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP small",
    "ap_medium": "AP medium",
    "ap_large": "AP large",
}
CAPTION = (
    "Average precision in per cent, by pycocotools: AP over IoU thresholds from .50 to .95, AP50 and AP75 at one "
    "threshold; small objects are below 32 x 32 pixels, large ones from 96 x 96 on. A dash: there is no such object."
)


def average_precisions(summary: Mapping[str, Any]) -> list[Block]:
    """Table of boxes and masks by column of `COLUMNS`, at the best step, at the end and on the test split; nothing for
    a run that is none of a detector."""
    rows: list[Row] = []
    for label, key in (("best on validation", "best"), ("at the end", "final"), ("test", "test")):
        values = summary.get(key) or {}
        for kind in ("box", "mask"):
            if f"{kind}_ap" in values:
                shown = [Metric(f"{kind}_{part}").value(values[f"{kind}_{part}"], unit=False) for part in COLUMNS]
                rows.append([kind, *shown, f"{label}, step {values['step']:,}"])
    return titled("Average precision", Table(["", *COLUMNS.values(), "at"], rows, CAPTION)) if rows else []
