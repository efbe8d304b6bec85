"""Reports: statements follow from the numbers, missing parts are left out, and a page needs no other file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from analysis.folders import VALUES, make_comparison, make_run
from common import refuses

from cached_lab.cli.main import main
from cached_lab.experiments.reports.blocks import FactList, Heading, ReportTable
from cached_lab.experiments.reports.comparison_page import write_compare_report, write_markdown
from cached_lab.experiments.reports.formatting import Metric, short_count, short_p, short_seconds
from cached_lab.experiments.reports.markdown import to_markdown
from cached_lab.experiments.reports.page import render
from cached_lab.experiments.reports.probe_page import write_probe_report
from cached_lab.experiments.reports.run_folder import read_comparison, read_run
from cached_lab.experiments.reports.run_page import write_run_report
from cached_lab.experiments.statistics import summarise, summarise_pairs

pytest.importorskip("matplotlib")
ACCURACY = Metric("accuracy")
EVIL = "<script>alert('$1$')</script>&{{ 7 * 7 }}"


class Page(HTMLParser):
    """Checks nesting and links, and collects headings and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert tag not in ("script", "link", "iframe")
        assert not any(re.match(r"(?i)(https?:)?//", value or "") for key, value in attrs if key in ("href", "src"))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_compare_report(tmp_path: Path) -> None:
    report = Page(write_compare_report(make_comparison(tmp_path / "digits")))
    assert report.headings == ["digits_vit", "Learning curves", "Cost", "Gates"]
    for expected in ("92.13 %", "+1.63 points", "[+1.32, +1.94]", "< 0.001", "31.1 M", "10.14 %", "test accuracy"):
        assert expected in report.text
    assert "cached compare digits_vit" in report.text


def test_a_comparison_of_pairs_as_a_page_and_as_markdown(tmp_path: Path) -> None:
    values = {"plain": [0.50, 0.52, 0.51], "grc": [0.54, 0.53, 0.55], "a|b": [0.53, 0.52, 0.55]}
    folder = make_comparison(tmp_path / "c", values, baselines={"root operator": 0.36})
    data = json.loads((folder / "compare.json").read_text())
    data |= {"pairs": [{"name": "grc", "against": "plain"}, {"name": "grc", "against": "a|b"}], "rows": 20_000}
    data["cache_use"] = {"grc": {"carry": [0.54, 0.53, 0.55], "reset": [0.5, 0.51, 0.5]}}
    for variant in data["variants"]:
        variant |= {"rows_interval": [0.501, 0.522], "training_flops": 5e9, "last_values": [0.4, 0.5, 0.3]}
    (folder / "compare.json").write_text(json.dumps(data))
    comparison = read_comparison(folder)
    assert comparison.pairs == summarise_pairs(values, [("grc", "plain"), ("grc", "a|b")])
    assert comparison.statistics == summarise(values, None), "made from the values"
    markdown = write_markdown(folder).read_text(encoding="utf-8")
    for text in (Page(write_compare_report(folder)).text, markdown):
        for expected in ("grc \N{MINUS SIGN} plain", "operations in training", "[50.10, 52.20]"):
            assert expected in text
        for expected in ("last step", "40.00 %", "baseline: root operator", "36.00 %", "Use of the cache: grc"):
            assert expected in text
        assert "difference to plain" not in text
    interval = comparison.pairs[0]["difference"]
    shown = ACCURACY.interval(interval["low"], interval["high"], True)
    assert markdown.startswith("# digits_vit\n") and f"| grc \N{MINUS SIGN} plain | +3.00 points {shown} |" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert widths == [widths[0]] * 6 + [widths[6]] * 4 + [widths[-1]] * 4  # variants, pairs, use of the cache


def test_markdown_holds_both_p_of_each_difference(tmp_path: Path) -> None:
    text = write_markdown(make_comparison(tmp_path / "several")).read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    header, by_name = rows[0], {row[0]: row for row in rows[1:]}
    assert header[2:5] == ["difference to plain", "p (uncorrected)", "p (Holm)"] and {*map(len, rows)} == {len(header)}
    tested = {row["name"]: row for row in summarise(VALUES, "plain")}
    for name in ("grc", "convolution"):
        assert by_name[name][3:5] == [short_p(tested[name][key]) for key in ("p_value", "p_adjusted")]


def test_run_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", accuracy=0.938)
    report = Page(write_run_report(run))
    assert report.headings == ["digits_vit", "Learning curves", "Gates"]
    for expected in ("93.80%", "251 k", "31.1 M", "27 ms", "baseline: majority class"):
        assert expected in report.text
    before = (run / "report.html").read_bytes()
    (run / "gates.json").write_bytes(b"damaged")
    refuses(r"gates\.json", write_run_report, run)
    assert (run / "report.html").read_bytes() == before and not list(run.glob(".*"))
    (run / "metrics.jsonl").write_text('{"stop": 1}\n')
    (run / "gates.json").unlink()
    refuses(r"metrics\.jsonl", write_run_report, run)


def test_missing_files_leave_their_sections_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", gated=False)
    (run / "config.yaml").unlink()
    (run / "summary.json").unlink()
    report = Page(write_run_report(run))
    assert report.headings == ["run", "Learning curves"] and "its last record is of step 1,000" in report.text
    folder = make_comparison(tmp_path / "compare", {"plain": [0.5], "grc": [0.6]}, baselines=None)
    (folder / "grc" / "seed_0" / "metrics.jsonl").unlink()
    report = Page(write_compare_report(folder))
    assert "Gates" not in report.headings and "Learning curves" in report.headings


def test_strings_of_users_are_escaped(tmp_path: Path) -> None:
    table = ReportTable([EVIL], [[EVIL, EVIL], [EVIL]], EVIL, EVIL)
    blocks = [Heading(EVIL, 1), EVIL, FactList({EVIL: EVIL, "empty": "", "left out": None}), table]
    (tmp_path / "blocks.html").write_text(render(EVIL, blocks))
    assert "<" not in to_markdown(blocks) and to_markdown(blocks).count("&lt;script") == 10
    assert to_markdown([ReportTable(["a|b"], [["c\n|d"]])]) == "| a\\|b |\n| --- |\n| c \\|d |\n"
    page = Page(tmp_path / "blocks.html")
    assert page.text.count(EVIL) == 11  # title, heading, paragraph, facts 2, table 6
    assert "left out" not in page.text and "empty" not in page.text
    folder = make_comparison(tmp_path / "compare", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]})
    data = json.loads((folder / "compare.json").read_text())
    data |= {"recipe": EVIL, "command": EVIL, "environment": {"torch": EVIL}, "baselines": {EVIL: 0.1}}
    data["variants"][1]["name"] = EVIL
    (folder / "compare.json").write_text(json.dumps(data))
    run = folder / "grc" / "seed_0"
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"name": EVIL, "variant": EVIL}))
    training = {"task": EVIL, "seed": 0, "accuracy": 1.0, "exact": 1.0, "steps": 9, "distances": {"1": 1.0}}
    arms = (("none", "no memory"), (EVIL, "within reach"))
    results = [training | {"memory": memory, "arm": arm, "chance": 0.25} for memory, arm in arms]
    content = {"command": EVIL, "date": "", "environment": {"error": EVIL}, "distance": 3, "results": results}
    content |= {"memories": [EVIL], "tasks": [EVIL], "notes": {EVIL: EVIL}}
    (tmp_path / "probe.json").write_text(json.dumps(content))
    for path in (write_compare_report(folder), write_run_report(run), write_probe_report(tmp_path / "probe.json")):
        assert "<script" not in path.read_text() and Page(path).text.count(EVIL) >= 3


def test_bad_folders_are_named(tmp_path: Path) -> None:
    for call in (write_run_report, write_compare_report, read_comparison):
        refuses(re.escape(str(tmp_path / "none")), call, tmp_path / "none")
    run = make_run(tmp_path / "run")
    for name, text in (("metrics.jsonl", '{"step": 1}\nno\n{"step": 2}\n'), ("summary.json", "3"), ("gates.json", "")):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        refuses(re.escape(name), read_run, run)
        (run / name).write_text(kept)
    data = json.loads((make_comparison(tmp_path / "c", {"plain": [0.5]}) / "compare.json").read_text())
    for change in ({"reference": "x"}, {"variants": [{}]}):
        (tmp_path / "compare.json").write_text(json.dumps(data | change))
        refuses(re.escape(str(tmp_path / "compare.json")), read_comparison, tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1}\n{"step": 2, "spl')
    assert [record["step"] for record in read_run(tmp_path).records] == [1], "a line being written is skipped"


def test_numbers_as_text() -> None:
    assert [short_count(x) for x in (0, 950, 999.7, 1234, 9.999e5, 27_525_120, 4.6e9)] == [
        *("0", "950", "1 k", "1.23 k", "1 M", "27.5 M", "4.6 G")
    ]
    assert [short_seconds(x) for x in (2e-5, 0.021, 1.5, 90, 7200)] == ["20 µs", "21 ms", "1.5 s", "1.5 min", "2 h"]
    assert [short_p(p) for p in (None, 1e-9, 0.05)] == ["\N{EN DASH}", "< 0.001", "0.050"]
    assert Metric("loss").value(0.12344) == "0.1234" and ACCURACY.difference(-0.0123) == "\N{MINUS SIGN}1.23 points"


def test_the_plot_command_draws_curves_and_writes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_comparison(tmp_path / "c", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]})
    run = folder / "grc" / "seed_0"
    assert main(["plot", "curves", str(folder)]) == 0 and (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.strip() == str(folder / "curves.png")
    assert main(["plot", "report", str(folder), str(run)]) == 0
    assert (folder / "report.html").is_file() and (run / "report.html").is_file()
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["plain", "55.00", "%"] in [row[:3] for row in rows] and ["grc", "65.00", "%"] in [row[:3] for row in rows]
    assert printed.rstrip().endswith(f"written: {run / 'report.html'}")
    for words, message in (
        (["curves", str(tmp_path)], "is not a run folder"),
        (["curves", str(run), "--output", "x.xyz"], "'xyz' is not supported"),
    ):
        assert main(["plot", *words]) == 2 and message in capsys.readouterr().err


def far_content(shares: dict[str, list[dict[int, float]]]) -> dict:
    """Content of far.json, from shares of right answers by name, seed and distance in segments of 16."""
    arms = {name: ("none", name) if name in ("no memory", "whole text") else (name, "far") for name in shares}
    results = [
        {"task": "latch", "memory": arms[name][0], "arm": arms[name][1], "seed": seed, "solved": 10, "chance": 0.25}
        | {"settings": {"course": {"nearest": 1}}, "state_bytes": 520}
        | {"far": {str(d): [share, share, 64] for d, share in of_seed.items()}}
        for name, seeds in shares.items()
        for seed, of_seed in enumerate(seeds)
    ]
    memories = [name for name, (memory, _) in arms.items() if memory != "none"]
    content = {"command": "cached probe", "date": "2026-01-01", "environment": {}, "far": 10_000, "rows": 64}
    content |= {"memories": memories, "tasks": ["latch"], "seeds": len(next(iter(shares.values()))), "results": results}
    return content | dict(course={"nearest": 1, "farthest": 10}, segments={"latch": 16}, asked={"latch": "Which one?"})


FAR = {
    "no memory": [{1: 0.2, 625: 0.20}, {1: 0.2, 625: 0.30}],
    "whole text": [{1: 1.0}, {1: 1.0}],
    "rmt": [{1: 1.0, 625: 1.0}, {1: 1.0, 20: 0.3}],  # the second one counts as a guess
    "memformer": [{1: 1.0, 20: 0.3}, {1: 1.0, 20: 0.2}],
    "grc_stream": [{1: 1.0, 625: 0.97}, {1: 1.0, 625: 0.99}],
}


def test_a_page_of_several_begins_with_distant_answers_and_ends_with_other_probes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_comparison(tmp_path / name, {"plain": [0.5, 0.6], "convolution": [0.6, 0.7]}, recipe=name)
    arms = (("none", "no memory", 0.25), ("rmt", "within reach", 1.0))
    trainings = [
        {"task": "latch", "memory": m, "arm": arm, "seed": 0, "accuracy": x, "exact": x, "steps": 9, "chance": 0.25}
        | {"distances": {"1": x, "3": x}}
        for m, arm, x in arms
    ]
    trainings[0]["exact"] = 0.125
    probe = {"command": "cached probe rmt", "date": "2026-01-01", "environment": {}, "distance": 3, "memories": ["rmt"]}
    probe |= {"tasks": ["latch"], "notes": {"rmt": "a note"}, "results": trainings}
    for name, content in (("far", far_content(FAR)), ("probe", probe)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(content))
    path = write_compare_report(tmp_path)
    page = Page(path)
    titles = [h for h in page.headings if h not in ("latch", "Learning curves", "Cost", "Gates")]
    assert titles == ["How far memories hold", "first", "second", "What memories hold"]
    said = (
        "Asked 10,000 tokens after the cue, grc_stream is right in 98.0 %, rmt is right in 62.5 %; the same model "
        "without a memory in 25.0 %, a guess in 25.0 %. In training they were at most 160 tokens apart."
    )
    assert said in page.text and "Which one?" in page.text and "a note." in page.text
    assert page.text.count("whole episodes") == 1 and "whole episodes 12.5 (9 steps)" in page.text
    text, at = path.read_text(encoding="utf-8"), 0
    for mark in ("<table", "Asked 10,000 tokens", "<svg", "cached probe", "cached compare"):
        at = text.index(mark, at)
