"""The command of the drills: try them, print a line for each, and leave the table of docs/results/reliability.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import catalogue
from .frame import Drill, Outcome, carry_out


def main() -> int:
    """Exit status 0 when every case held."""
    drills = {drill.name: drill for drill in catalogue.drills()}
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="DRILL", help=f"of {', '.join(drills)}; all without a name")
    parser.add_argument("--count", type=int, help="cases of each (default: as many as the drill says)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="draws the cases (default: the clock)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--case", help="one case of one drill, by its name")
    parser.add_argument("--table", type=Path, help="a Markdown file whose part between the marks is written again")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in drills]:
        parser.error(f"no drill is called {unknown[0]!r}; there are {', '.join(drills)}")
    print(f"seed {arguments.seed}", flush=True)
    chosen = [drills[name] for name in arguments.names] or list(drills.values())
    if arguments.case is not None and len(chosen) != 1:
        parser.error("--case repeats a case of one drill: name the drill")
    outcomes = [_carried_out(drill, arguments) for drill in chosen]
    if arguments.table is not None:
        catalogue.write_table(arguments.table, outcomes, arguments.seed)
    failed = sum(len(outcome.failed) for outcome in outcomes)
    print(f"{sum(len(outcome.results) for outcome in outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _carried_out(drill: Drill, arguments: argparse.Namespace) -> Outcome:
    cases = (
        [arguments.case] if arguments.case is not None else drill.cases(arguments.count or drill.count, arguments.seed)
    )
    outcome = carry_out(drill, cases, arguments.jobs, lambda text: print(text, file=sys.stderr, flush=True))
    print(outcome.line(), flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
