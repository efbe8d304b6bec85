"""All that is timed on one card, in minutes: cores, memories, image models and writing, eager and compiled.

Each row says what it takes beside the first of its group, and of the device's measured peaks. Results are given after
every part, so that whatever happens to a later one costs none of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping

from cached_lab.experiments.reports.markdown import table

from . import peaks
from .everything_parts import DTYPES, PARTS, Part
from .groups import Clock, Report, Row, described, measure


def run(
    device: str,
    *,
    rounds: int = 10,
    minutes: float = 8.0,
    quick: bool = False,
    parts: Mapping[str, Part] | None = None,
) -> Iterator[Report]:
    """Time everything that time allows; gives the report as it stands after each part.

    Args:
        rounds: most counted rounds of a group; fewer where they would take too long.
        minutes: after which nothing new is begun. Every part has its share of what is left; the rest goes to the next.
        quick: tiny sizes, as a test of this very command.
        parts: of `PARTS`; None for all.
    """
    chosen = PARTS if parts is None else parts
    end = time.monotonic() + 60 * minutes
    sizes = {"side": 256, "mebibytes": 16} if quick else {}
    report = Report(peaks.measure(device, DTYPES, **sizes))
    for index, (name, part) in enumerate(chosen.items()):
        now = time.monotonic()
        clock = Clock(now + (end - now) / (len(chosen) - index))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peers and compilers
                for group in part(device, quick):
                    measure(group, report, rounds, device, clock)
        except Exception as error:
            report.failed.append(f"{name}: {described(error)}")
        yield report


def as_markdown(report: Report) -> str:
    """A table for each part and dtype, and what failed or was left out, by name."""
    pieces = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.part, row.work, row.dtype), []).append(row)
    head = ["case", "ms", "time, first = 1", "fastest", "% of peak FLOPs", "% of peak bytes", "peak MiB"]
    for (part, work, dtype), rows in groups.items():
        cells = [
            [
                row.case,
                f"{1e3 * row.time.seconds:,.2f}",
                *(("1", "1") if row.case == row.reference else (str(row.time), f"{row.time.fastest:.3f}x")),
                *("" if share is None else f"{share:.1f}" for share in (row.flops_share, row.bytes_share)),
                "" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
            ]
            for row in rows
        ]
        pieces.append(f"**{part}**: {work}, {dtype}\n\n{table(head, cells)}")
    for title, lines in {"Failed": report.failed, "Left out": report.left_out}.items():
        if lines:
            pieces.append("\n".join([f"{title}:", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(pieces)
