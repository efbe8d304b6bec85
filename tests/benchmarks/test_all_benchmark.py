"""`cached benchmark all`: its counts, failures that cost no other result, and the parts at tiny sizes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from integrations.hosts import library

from benchmarks import all as everything
from benchmarks import command
from benchmarks.groups import BenchmarkCase as Case
from benchmarks.groups import BenchmarkReport as Report
from benchmarks.groups import CaseGroup as Group
from benchmarks.groups import Unavailable
from benchmarks.groups import measure_group as measure
from benchmarks.peaks import Peaks, measure_peaks
from cached_lab.cli.main import main
from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.traffic import bytes_of

SIDE = 32
PEAKS = Peaks({"float32": 1e9}, 1e9)


def product() -> Callable[[], object]:
    a, b = torch.randn(2, SIDE, SIDE).unbind()
    return lambda: a @ b


def broken() -> Callable[[], object]:
    raise RuntimeError("no such\nkernel")


def absent() -> Callable[[], object]:
    raise Unavailable("it is not installed")


def group(**cases: Case) -> Group:
    return Group("some", "product", torch.float32, cases)


def later(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def test_operations_and_bytes_are_those_of_the_operators() -> None:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5)
    # Forward, and the gradient of only a.
    assert flops_of(lambda: (a @ b).sum().backward()) == 2 * 2 * 4 * 6 * 5
    with torch.no_grad():
        assert bytes_of(lambda: a @ b) == 4 * (24 + 30 + 20)
        assert bytes_of(lambda: a.mT[:2].expand(3, 2, 4)) == 0  # views
        one = torch.ones(1).expand(4, 5)
        assert bytes_of(lambda: one * 2) == 4 * (1 + 20)  # of what is expanded its storage
        assert bytes_of(lambda: torch.empty(100)) == 0
        copies = [torch.zeros(3), torch.zeros(2)]
        assert bytes_of(lambda: torch._foreach_add_(copies, 1.0)) == 4 * (5 + 5)


def test_a_case_that_fails_or_lacks_something_costs_the_others_nothing() -> None:
    report = Report(PEAKS)
    cases = {
        "absent": Case(absent),
        "broken": Case(broken),
        "product": Case(product),
        "alike": Case(product, "product"),
    }
    measure(group(**cases, other=Case(product, None)), report, 3, "cpu", later())
    assert report.failed == ["some, product, float32, broken: RuntimeError: no such kernel"]
    assert report.left_out == ["some, product, float32, absent: it is not installed"]
    plain, alike, other = report.rows
    assert [row["case"] for row in report.rows] == ["product", "alike", "other"]
    assert {row["reference"] for row in report.rows} == {"product"} and plain["time"].median == 1
    flop, moved = 2 * SIDE**3, 3 * 4 * SIDE**2
    assert plain["gflop"] == alike["gflop"] == flop / 1e9 and plain["gigabytes"] == alike["gigabytes"] == moved / 1e9
    assert plain["flops_share"] == pytest.approx(100 * flop / plain["time"].seconds / 1e9)
    assert plain["bytes_share"] == pytest.approx(100 * moved / plain["time"].seconds / 1e9)
    assert other["gflop"] is other["flops_share"] is other["bytes_share"] is None
    assert plain["peak_mib"] == 4 * SIDE**2 / 2**20 and alike["peak_mib"] is None


def test_a_group_that_fails_while_it_is_timed_costs_the_next_one_nothing() -> None:
    def tired() -> Callable[[], object]:
        calls = iter(range(5))  # to set up, to count operations and bytes, for the peak, and once for the time
        return lambda: next(calls)

    report = Report(PEAKS)
    for cases in ({"tired": Case(tired)}, {"product": Case(product)}):
        measure(group(**cases), report, 3, "cpu", later())
    assert report.failed == ["some, product, float32, all in turn: StopIteration: "]
    assert [row["case"] for row in report.rows] == ["product"]


def test_nothing_is_begun_when_time_is_up() -> None:
    report = Report(PEAKS)
    measure(group(product=Case(product)), report, 3, "cpu", later(-1))
    assert report.rows == [] and report.left_out == ["some, product, float32, product: no time was left"]


def test_peaks_are_measured() -> None:
    found = measure_peaks("cpu", (torch.float32,), side=64, mebibytes=1)
    assert list(found.flops) == ["float32"] and found.flops["float32"] > 0 and found.bandwidth > 0
    assert str(Peaks({"float32": 2.5e12}, 3e9)) == "float32 2.5 TFLOP/s, 3 GB/s"


def parts() -> dict[str, everything.Part]:
    def good(device: str, quick: bool) -> Iterator[Group]:
        yield group(product=Case(product))

    def bad(device: str, quick: bool) -> Iterator[Group]:
        yield group(product=Case(product), broken=Case(broken))
        raise ValueError("out of luck")

    return {"good": good, "bad": bad, "last": good}


def options() -> argparse.Namespace:
    quick = ["--device", "cpu", "--rounds", "1", "--quick"]
    return command.parser_of(everything).parse_args(quick)


def test_a_report_is_there_after_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "PARTS", parts())
    seen = []
    for result in everything.measure(options()):
        seen.append((len(result.rows), len(result.failed)))
    assert seen == [(1, 0), (2, 2), (3, 2)]
    assert result.failed[1] == "bad: ValueError: out of luck"
    assert "**some**: product, float32" in result.text and "- bad: ValueError: out of luck" in result.text


def test_the_command_writes_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    found = parts()

    def killed(device: str, quick: bool) -> Iterator[Group]:
        assert len(json.loads(path.read_text())["rows"]) == 2
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(everything, "PARTS", {**found, "last": killed})
    command = ["benchmark", "all", "--device", "cpu", "--quick", "--rounds", "1", "--out", str(path)]
    assert main(command) == 130
    kept = json.loads(path.read_text())
    assert [row["case"] for row in kept["rows"]] == ["product", "product"] and len(kept["failed"]) == 2
    assert "TFLOP/s" in kept["environment"]["measured peaks"]
    assert path.with_suffix(".md").read_text().startswith("**some**: product, float32")
    monkeypatch.setattr(everything, "PARTS", found)
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("| product |") == 3


def test_every_part_can_be_built_and_run_once() -> None:
    """Each kind of case, the first of its part; the whole is a slow test."""
    for name in ("timm", "transformers"):
        library(name)
    for part in everything.PARTS.values():
        (first, *_) = part("cpu", True)
        next(iter(first.cases.values())).make()()


def test_kernels_that_need_a_gpu_are_left_out_by_name() -> None:
    (bf16, _) = everything.attention_part("cpu", True)
    for name in ("fla's linear, causal", "fla's delta rule, causal", "FlexAttention, window of 32"):
        with pytest.raises(Unavailable, match="GPU"):
            bf16.cases[name].make()


@pytest.mark.slow
def test_all_of_it_at_tiny_sizes() -> None:
    for name in ("timm", "transformers"):
        library(name)
    *_, result = everything.measure(options())
    assert result.failed == [] and {row["part"] for row in result.rows} == set(everything.PARTS)
    assert all(row["time"].seconds > 0 for row in result.rows)
