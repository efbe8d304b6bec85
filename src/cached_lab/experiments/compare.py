"""Comparisons: variants of one recipe, trained from the same seeds on the same data order, and their statistics.

Finished runs are kept: the same comparison continues after an interruption, and more seeds or variants extend it.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from cached_lab.experiments.build import memory_name
from cached_lab.experiments.environment import environment
from cached_lab.experiments.load import read_run_config
from cached_lab.experiments.run import run_training
from cached_lab.registries import DATASETS
from cached_lab.training.config import RunConfig, config_hash, config_to_yaml
from cached_lab.training.distributed import pick_device
from cached_lab.training.interruption import RunFailed
from cached_lab.training.run_lock import folder_lock
from cached_lab.training.scores import goodness
from cached_transformers.files import json_text, write_whole
from cached_transformers.registry import MEMORIES

from .cache_use import score_variant
from .efficiency import NOTE, efficiencies
from .reports.comparison_page import findings, write_compare_report, write_markdown
from .reports.run_folder import read_comparison
from .reports.terminal import show
from .statistics import summarise, summarise_pairs, wilson_interval
from .subprocesses import start_command, work_off
from .variants import Variant, tuned

NO_BAR = (
    "No efficiency: it needs the variant plain, and --control whole, which reads each document at once; a stream of "
    "text has no such variant."
)


class VariantComparison:
    """The finished and missing runs of a comparison.

    Args:
        recipe: shared by all variants.
        seeds: of the runs of every variant.
        folder: of runs and results.
        baselines: scores of simple guessers, for the report.
        against: name of the reference variant; by default "plain" or else the first. No run depends on it.
        pairs: (first, second) variants whose differences are tested; by default each variant and the reference.
        rows: number of scored rows, for the interval of an accuracy; None for no interval.
        cache_use: also score runs with a shared cache in the modes of `cache_use.py`.
        tune: an option and its values; each variant takes the one that validates best in runs of the first seed.

    Raises:
        ValueError: an unknown option of `tune`, or a value that does not fit.
    """

    def __init__(
        self,
        recipe: RunConfig,
        variants: list[Variant],
        seeds: list[int],
        folder: Path,
        baselines: dict[str, float] | None,
        *,
        against: str = "",
        pairs: list[tuple[str, str]] | None = None,
        rows: int | None = None,
        cache_use: bool = False,
        tune: tuple[str, list[str]] | None = None,
    ) -> None:
        self.recipe, self.variants, self.seeds = recipe, variants, seeds
        self.folder, self.baselines = folder, baselines
        names = [variant.name for variant in variants]
        self.candidates = [] if tune is None else [tuned(variant, *tune) for variant in variants]
        self.reference = against or ("plain" if "plain" in names else names[0])
        self.pairs = pairs or []
        self.metric = recipe.training.metric
        self.rows = rows if self.metric == "accuracy" else None
        self.split, self._part = ("validation", "best") if recipe.training.test == "none" else ("test", "test")
        shared = {entry.name for entry in MEMORIES if getattr(entry.factory, "shared", False) is True}
        self.questioned = [v for v in variants if cache_use and shared & set(memory_name(v.config).split("+"))]
        self.cache_use: dict[str, dict[str, list[float]]] = {}
        self._finished: dict[str, dict[str, Any]] = {}

    def summary(self, variant: Variant, seed: int) -> dict[str, Any] | None:
        """Return the summary of a finished run; None for a run to train or continue."""
        name = variant.run_name(seed)
        folder = self.folder / name
        path = folder / "summary.json"
        if name not in self._finished and path.is_file():
            same = config_hash(read_run_config(folder)) == config_hash(variant.seeded(seed))
            try:
                summary = json.loads(path.read_text(encoding="utf-8"))
                if same and summary["steps"] == variant.config.training.steps:
                    float(summary[self._part][self.metric])
                    self._finished[name] = summary
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is damaged ({error!r}); remove it: the command writes it again") from error
        return self._finished.get(name)

    def finished(self, variant: Variant) -> list[dict[str, Any]]:
        """Return the summaries of a variant up to its first unfinished run, in order of the seeds."""
        return [s for s in takewhile(bool, (self.summary(variant, seed) for seed in self.seeds)) if s is not None]

    def values(self) -> dict[str, list[float]]:
        """Return scores by variant, in order of the seeds."""
        return {v.name: [s[self._part][self.metric] for s in self.finished(v)] for v in self.variants}

    def tune(self, jobs: int, console: Console) -> None:
        """Give each variant its best candidate (ValueError: runs without validation)."""
        self._train([(candidate, self.seeds[0]) for each in self.candidates for candidate in each], jobs, console)

        def good(candidate: Variant) -> float:
            best = (self.summary(candidate, self.seeds[0]) or {}).get("best")
            if best is None:
                raise ValueError(
                    f"--tune {candidate.facts['tuned']}: runs have no validation; set training.evaluate_every"
                )
            return goodness(self.metric, best[self.metric])

        self.variants = [max(each, key=good) for each in self.candidates]
        asked = {variant.name for variant in self.questioned}
        self.questioned = [variant for variant in self.variants if variant.name in asked]
        for variant in self.variants:
            console.print(f"{variant.name}: {variant.facts['tuned']}", markup=False)

    def train_missing(self, jobs: int, console: Console) -> None:
        """Train every missing run, seed by seed."""
        self._train([(variant, seed) for seed in self.seeds for variant in self.variants], jobs, console)

    def _train(self, runs: list[tuple[Variant, int]], jobs: int, console: Console) -> None:
        missing = [(variant, seed) for variant, seed in runs if self.summary(variant, seed) is None]
        kept = len(runs) - len(missing)
        if kept:
            console.print(f"{kept} finished runs kept, {len(missing)} to train")
        for variant in self.variants:
            facts = variant.facts
            for key, what in (("flops_ratio", "FLOPs"), ("parameters_ratio", "parameters")):
                if key in facts:
                    size = f"{facts[key]:.4f} of the {what} of {facts['matched']}"
                    console.print(f"{variant.name}: feed_forward {facts['feed_forward']}, {size}")
        if jobs == 1:
            for variant, seed in missing:
                folder = self.folder / variant.run_name(seed)
                run_training(variant.seeded(seed), folder, "auto", console, variant.name)
            return
        self._train_apart(missing, jobs)

    def _train_apart(self, missing: list[tuple[Variant, int]], jobs: int) -> None:
        """Train runs in child processes; the output of each goes to `log.txt` in its folder."""
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}

        def start(run: tuple[Variant, int]) -> subprocess.Popen[bytes]:
            variant, seed = run
            folder = self.folder / variant.run_name(seed)
            folder.mkdir(parents=True, exist_ok=True)
            recipe = Path(scratch) / f"{folder.parent.name}_{seed}.yaml"
            recipe.write_text(config_to_yaml(variant.seeded(seed)), encoding="utf-8")
            arguments = ["train", str(recipe), "--out", str(folder), "--variant", variant.name]
            with (folder / "log.txt").open("a", encoding="utf-8") as log:
                return start_command(arguments, log, environment)

        def ended(run: tuple[Variant, int], status: int) -> None:
            folder = self.folder / run[0].run_name(run[1])
            if status:
                raise RunFailed(
                    f"the run in {folder} ended with status {status}; its output is in {folder / 'log.txt'}. Other "
                    "runs were asked to save a checkpoint and stop; the same command continues"
                )

        with tempfile.TemporaryDirectory() as scratch:
            work_off(missing, jobs, start, ended)

    def write(self, command: str) -> Path:
        """Write compare.json; returns its path."""
        values = self.values()
        result: dict[str, Any] = {
            "recipe": self.recipe.name,
            "seeds": self.seeds,
            "metric": self.metric,
            "split": self.split,
            "reference": self.reference,
            "date": datetime.date.today().isoformat(),
            "command": command,
            "environment": environment(pick_device(self.recipe.training.device)),
            "baselines": self.baselines,
            "variants": [self._row(variant) for variant in self.variants],
            "statistics": summarise(values, None if self.pairs else self.reference),
        }
        result |= self._efficiency(result["variants"])
        result |= {"pairs": summarise_pairs(values, self.pairs)} if self.pairs else {}
        result |= {} if self.rows is None else {"rows": self.rows}
        result |= {"cache_use": self.cache_use} if self.cache_use else {}
        path = self.folder / "compare.json"
        write_whole(path, json_text(result))
        return path

    def _efficiency(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Add efficiencies to the rows of variants; returns the remark on them, for text and documents."""
        task = getattr(DATASETS.entry(self.recipe.data["name"]).factory, "task", "")
        if task not in ("documents", "language"):
            return {}
        scores = {row["name"]: mean(row["values"]) for row in rows}
        shares = efficiencies(self.metric, scores, "plain", "control-whole")
        for row in rows:
            row["efficiency"] = shares[row["name"]]
        return {"efficiency": NOTE if {"plain", "control-whole"} <= scores.keys() else NO_BAR}

    def rows_interval(self, values: list[float], summaries: list[dict[str, Any]]) -> tuple[float, float] | None:
        """Return the interval due to the scored rows, common to all seeds.

        It is Wilson's interval of the mean accuracy, or the mean of the bootstrap intervals in the summaries.
        """
        found = [(summary["test"] or {}).get(f"{self.metric}_interval") for summary in summaries]
        if self.split == "test" and self.metric != "accuracy" and found and all(found):
            low, high = (sum(interval[end] for interval in found if interval) / len(found) for end in (0, 1))
            return low, high
        if self.rows is None:
            return None
        interval = wilson_interval(round(sum(values) / len(values) * self.rows), self.rows)
        assert interval.low is not None and interval.high is not None
        return interval.low, interval.high

    def _row(self, variant: Variant) -> dict[str, Any]:
        summaries, values = self.finished(variant), self.values()[variant.name]
        interval = self.rows_interval(values, summaries)
        last = [s["test_last"][self.metric] for s in summaries if s.get("test_last")]
        return {
            "name": variant.name,
            "parameters": summaries[0]["parameters"],
            "flops": summaries[0]["flops"],
            "seconds_per_step": sum(s["seconds_per_step"] for s in summaries) / len(summaries),
            "values": values,
            "runs": [variant.run_name(seed) for seed in self.seeds],
            **({"last_values": last} if len(last) == len(values) else {}),
            **({} if interval is None else {"rows_interval": list(interval)}),
            **variant.facts,
        }


def carry_out(comparison: VariantComparison, jobs: int, command: str, console: Console) -> None:
    """Train missing runs, then write compare.json, compare.md and the report.

    Args:
        jobs: runs at a time. command: of the user, for the record.

    Raises:
        InUse: another process carries out a comparison in the folder.
        Interrupted, Stopped: asked to stop; runs under way have saved a checkpoint.
        RunFailed, OSError: a run failed, or a file could not be written.
    """
    with folder_lock(comparison.folder):
        if comparison.candidates:
            comparison.tune(jobs, console)
        comparison.train_missing(jobs, console)
        for variant in comparison.questioned:  # scores in their folders are kept
            about = (comparison.seeds, comparison.folder, comparison.split, console)
            modes = score_variant(variant, *about).items()
            comparison.cache_use[variant.name] = {mode: [r[comparison.metric] for r in rows] for mode, rows in modes}
        comparison.write(command)
        path = write_markdown(comparison.folder)
        show(console, *findings(read_comparison(comparison.folder)))
        try:
            path = write_compare_report(comparison.folder)
        except ImportError as error:
            console.print(f"no report: {error}", markup=False)
    console.print(f"written: {path}", markup=False, soft_wrap=True)
