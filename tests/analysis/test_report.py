"""Reports: statements follow from the numbers, missing parts are left out, and the page is self-contained."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from analysis.folders import VALUES, make_comparison, make_run

from cached_lab.cli import plot
from cached_lab.experiments.reports.blocks import FactList, Folded, Heading, Paragraph, ReportTable, TableCell
from cached_lab.experiments.reports.comparison_page import comparison_markdown, write_compare_report, write_markdown
from cached_lab.experiments.reports.far_page import write_far_report
from cached_lab.experiments.reports.formatting import (
    Metric,
    comparison_summary,
    short_count,
    short_p,
    short_seconds,
)
from cached_lab.experiments.reports.page import render
from cached_lab.experiments.reports.probe_page import write_probe_report
from cached_lab.experiments.reports.run_folder import read_comparison, read_run
from cached_lab.experiments.reports.run_page import write_run_report
from cached_lab.experiments.statistics import summarise, summarise_pairs

pytest.importorskip("matplotlib")
ACCURACY = Metric("accuracy")
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting and ids, and collects headings, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        for key in ("href", "src", "xlink:href"):
            value = values.get(key) or ""
            assert not re.match(r"(?i)(https?:)?//", value), f"the page asks for {value}"
        if tag == "a":
            self.links.append(values["href"])
        assert tag not in ("script", "link", "iframe")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_compare_report(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "digits")
    write_run_report(folder / "grc" / "seed_0")
    report = read(write_compare_report(folder))
    sections = ["Differences", "Learning curves", "Accuracy against cost", "Gates", "Feature maps: grc", "Runs"]
    assert report.headings == ["digits_vit", *sections, "Configurations"]
    assert report.links == ["grc/seed_0/report.html"]  # the only run report that exists
    for expected in ("92.13 %", "+1.63 points", "[+1.32, +1.94]", "< 0.001", "1.24 \N{MULTIPLICATION SIGN}", "10.14 %"):
        assert expected in report.text
    assert "cached compare digits_vit" in report.text


def test_a_comparison_of_pairs_as_a_page_and_as_markdown(tmp_path: Path) -> None:
    values = {"plain": [0.50, 0.52, 0.51], "grc": [0.54, 0.53, 0.55], "control": [0.53, 0.52, 0.55]}
    folder = make_comparison(tmp_path / "c", values, baselines={"root operator": 0.36})
    data = json.loads((folder / "compare.json").read_text())
    data |= {"pairs": [{"name": "grc", "against": "plain"}, {"name": "grc", "against": "control"}], "rows": 20_000}
    for variant in data["variants"]:
        variant |= {"rows_interval": [0.501, 0.522], "training_flops": 5e9, "last_values": [0.4, 0.5, 0.3]}
    (folder / "compare.json").write_text(json.dumps(data))
    comparison = read_comparison(folder)
    assert comparison.pairs == summarise_pairs(values, [("grc", "plain"), ("grc", "control")])
    assert comparison.statistics == summarise(values, None)
    report = read(write_compare_report(folder))
    for expected in (
        "grc \N{MINUS SIGN} plain",
        "grc \N{MINUS SIGN} control",
        "operations in training",
        "[50.10, 52.20]",
        "on 20,000 rows",
        "last step",
        "40.00 %",
        "baseline: root operator",
        "36.00 %",
    ):
        assert expected in report.text
    assert "difference to plain" not in report.text
    markdown = comparison_markdown(comparison)
    interval = comparison.pairs[0]["difference"]
    shown = Metric("accuracy").interval(interval["low"], interval["high"], True)
    assert f"| grc \N{MINUS SIGN} plain | +3.00 points {shown} |" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3 + 1 + 2 + 2  # two headers, variants, baseline, pairs
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert widths == [widths[0]] * 6 + [widths[-1]] * 4
    assert "Between grc and control no difference can be shown with 3 seeds" in markdown


def test_markdown_of_a_comparison_with_one_reference(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"plain": [0.5, 0.6], "a|b": [0.6, 0.8]})
    text = write_markdown(folder).read_text(encoding="utf-8")
    assert text.startswith("# digits_vit\n") and "| variant | test accuracy | difference to plain | p |" in text
    assert "| a\\|b | 70.00 %" in text and "+15.00 points" in text


def test_report_of_several_comparisons(tmp_path: Path) -> None:
    make_comparison(tmp_path / "a", {"plain": [0.5, 0.6], "convolution": [0.6, 0.5]}, recipe="first")  # no maps to draw
    make_comparison(tmp_path / "b", {"plain": [0.5], "convolution": [0.6]}, recipe="second")
    (tmp_path / "c").mkdir()
    headings = read(write_compare_report(tmp_path)).headings
    assert [h for h in headings if h in ("first", "second")] == ["first", "second"]
    headings = read(write_compare_report(tmp_path, ["b", "a"])).headings
    assert [h for h in headings if h in ("first", "second")] == ["second", "first"]
    assert read(write_compare_report(tmp_path, ["b"])).headings[0] == "second"


def test_run_report(tmp_path: Path) -> None:
    report = read(write_run_report(make_run(tmp_path / "run", accuracy=0.938)))
    assert report.headings == ["digits_vit", "Learning curves", "Gates", "Feature maps", "Configuration"]
    for expected in ("93.80 %", "251 k", "31.1 M", "27 ms", "memory: grc", "Trained for 1,000 steps"):
        assert expected in report.text


def test_missing_files_leave_their_sections_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", gated=False)
    (run / "config.yaml").unlink()
    (run / "summary.json").unlink()
    report = read(write_run_report(run))
    assert (
        report.headings == ["run", "Learning curves"]
        and "not finished: its last record is of step 1,000" in report.text
    )
    folder = make_comparison(tmp_path / "compare", {"plain": [0.5], "grc": [0.6]}, baselines=None)
    (folder / "grc" / "seed_0" / "metrics.jsonl").unlink()
    report = read(write_compare_report(folder))
    assert "Gates" not in report.headings and "Learning curves" in report.headings


def test_user_strings_are_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("$1$")</script>&'
    folder = make_comparison(tmp_path / "compare", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]})
    data = json.loads((folder / "compare.json").read_text())
    data |= {"recipe": evil, "command": evil, "environment": {"torch": evil}, "baselines": {evil: 0.1}}
    data["variants"][1]["name"] = evil
    (folder / "compare.json").write_text(json.dumps(data))
    (folder / "plain" / "seed_0" / "config.yaml").write_text(evil)
    report = write_compare_report(folder)
    assert "<script" not in report.read_text() and read(report).text.count(evil) >= 6


def test_names_and_errors_in_a_run_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('$1$')</script>&"
    run = make_run(tmp_path / "run", gated=True)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"name": evil, "variant": evil, "baselines": {evil: 0.1}, "environment": {"error": evil}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.yaml").write_text(f"# {evil}\nname: x\n")
    report = write_run_report(run)
    assert "<script" not in report.read_text()
    page = read(report)
    assert page.headings[0] == evil and page.text.count(evil) >= 7


def test_names_in_a_probe_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&"
    training = {"task": evil, "seed": 0, "accuracy": 1.0, "steps": 9, "distances": {"1": 1.0}, "chance": 0.25}
    arms = (("none", "no memory"), (evil, "within reach"))
    results = [training | {"memory": memory, "arm": arm} for memory, arm in arms]
    content = {"command": evil, "date": "", "environment": {"error": evil}, "distance": 3, "results": results}
    content |= {"memories": [evil], "tasks": [evil], "notes": {evil: evil}}
    (tmp_path / "probe.json").write_text(json.dumps(content))
    report = write_probe_report(tmp_path)
    assert "<script" not in report.read_text() and read(report).headings == ["What memories hold", evil]


def test_old_report_survives_a_failed_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = write_run_report(run).read_bytes()
    (run / "feature_maps.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"feature_maps\.npz"):
        write_run_report(run)
    assert (run / "report.html").read_bytes() == before and not list(run.glob(".*"))


def test_statistics_are_made_from_the_values(tmp_path: Path) -> None:
    folder = make_comparison(
        tmp_path / "c", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]}, statistics=[{"name": "grc", "mean": 9}]
    )
    assert read_comparison(folder).statistics == summarise({"plain": [0.5, 0.6], "grc": [0.6, 0.7]}, "plain")


def test_bad_folders_are_named(tmp_path: Path) -> None:
    for call in (write_run_report, write_compare_report, read_comparison):
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "none"))):
            call(tmp_path / "none")
    run = make_run(tmp_path / "run")
    for name, text, message in (
        ("metrics.jsonl", '{"step": 1}\nnot json\n{"step": 2}\n', r"metrics\.jsonl, line 2 is not JSON"),
        ("metrics.jsonl", '{"split": "train"}\n', r'line 1 is not a record with a whole number "step"'),
        ("summary.json", "[]", r"summary\.json must hold a JSON object, not list"),
        ("gates.json", '{"layers": 3}', r"gates\.json must hold"),
    ):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_run(run)
        (run / name).write_text(kept)
    folder = make_comparison(tmp_path / "c", {"plain": [0.5]})
    for change, message in (
        ({"reference": "x"}, "reference='x'"),
        ({"variants": [{}]}, "lacks what a comparison needs"),
    ):
        data = json.loads((folder / "compare.json").read_text()) | change
        (tmp_path / "compare.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message):
            read_comparison(tmp_path)


def test_a_line_being_written_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1}\n{"step": 2, "spl')
    assert [record["step"] for record in read_run(tmp_path).records] == [1]


def summary_of(
    values: dict[str, list[float]], metric: Metric = ACCURACY, baselines: dict[str, float] | None = None
) -> str:
    return " ".join(comparison_summary(summarise(values, "plain"), "plain", metric, "test", baselines or {}))


def test_summary_claims_what_the_test_shows() -> None:
    text = summary_of(VALUES)
    assert "grc is 1.63 points better than plain, more than chance" in text
    assert "Between convolution and plain no difference can be shown with 5 seeds (Holm's p = 0.08" in text
    worse = summary_of({"plain": VALUES["grc"], "grc": VALUES["plain"]})
    assert "grc is 1.63 points worse than plain, more than" in worse


def test_markdown_says_of_each_p_whether_it_is_corrected(tmp_path: Path) -> None:
    several = comparison_markdown(read_comparison(make_comparison(tmp_path / "several")))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in several.splitlines() if line.startswith("| ")]
    header, by_name = rows[0], {row[0]: row for row in rows[1:]}
    assert header[2:5] == ["difference to plain", "p (uncorrected)", "p (Holm)"] and {*map(len, rows)} == {len(header)}
    tested = {row["name"]: row for row in summarise(VALUES, "plain")}
    for name in ("grc", "convolution"):
        assert by_name[name][3:5] == [short_p(tested[name][key]) for key in ("p_value", "p_adjusted")]
    assert f"(Holm's p = {by_name['convolution'][4]}" in several and " (p = " not in several
    one = comparison_markdown(
        read_comparison(make_comparison(tmp_path / "one", {n: VALUES[n] for n in ("plain", "grc")}))
    )
    assert "| difference to plain | p | seeds |" in one and "Holm" not in one
    pair = summarise_pairs(VALUES, [("grc", "plain"), ("convolution", "plain")])
    content = read_comparison(make_comparison(tmp_path / "pairs", pairs=pair))
    assert "| pair | difference | p (uncorrected) | p (Holm) |" in comparison_markdown(content)


def test_summary_corrects_for_several_variants() -> None:
    plain = [0.50, 0.51, 0.52, 0.53]
    shifted = [a + d for a, d in zip(plain, [0.01, 0.03, 0.02, 0.04], strict=True)]
    assert summarise({"plain": plain, "a": shifted}, "plain")[1]["p_value"] < 0.05
    assert "more than chance" in summary_of({"plain": plain, "a": shifted})
    assert "more than chance" not in summary_of({"plain": plain, "a": shifted, "b": shifted, "c": shifted})


def test_summary_without_a_test() -> None:
    assert "from one seed nothing can be concluded" in summary_of({"plain": [0.5], "grc": [0.9]})
    text = summary_of({"plain": [0.5, 0.6], "grc": [0.5, 0.6]})
    assert "no difference can be shown" in text and "p = 1.000" in text
    assert "the t-test is undefined" in summary_of({"plain": [0.5, 0.6], "grc": [0.6, 0.7]})


def test_summary_of_a_loss_and_of_baselines() -> None:
    text = summary_of(
        {"plain": [2.0, 2.1, 2.05], "grc": [1.0, 1.09, 1.06]}, Metric("loss"), {"uniform": 2.0, "zero": 3.0}
    )
    assert "grc is 1.01 better than plain" in text or "grc is 1 better than plain" in text
    assert "baseline “uniform” reaches 2." in text and "No better than that on average: plain." in text
    assert "No better than that" not in summary_of(VALUES, baselines={"majority class": 0.1})


def test_numbers_as_text() -> None:
    assert [short_count(x) for x in (0, 950, 999.7, 1234, 9.999e5, 27_525_120, 4.6e9)] == [
        *("0", "950", "1 k", "1.23 k", "1 M", "27.5 M", "4.6 G"),
    ]
    assert [short_seconds(x) for x in (2e-5, 0.021, 1.5, 90, 7200)] == ["20 µs", "21 ms", "1.5 s", "1.5 min", "2 h"]
    assert [short_p(p) for p in (None, 1e-9, 0.05)] == ["\N{EN DASH}", "< 0.001", "0.050"]
    assert Metric("loss").value(0.12344) == "0.1234" and ACCURACY.difference(-0.0123) == "\N{MINUS SIGN}1.23 points"


def test_table_cells() -> None:
    html = render("t", [ReportTable(["a", "b"], [[TableCell("x", link="p?a=1&b"), TableCell("1", small="<2>")]], "c")])
    assert (
        '<a href="p?a=1&amp;b">x</a>' in html and "<small>&lt;2&gt;</small>" in html and '<td class="number">1' in html
    )


def test_text_of_every_block_is_escaped_and_shown_as_it_is() -> None:
    evil = "<script>'\"&\n  {{ 7 * 7 }}"
    blocks = [
        Heading(1, evil),
        Paragraph(evil, evil),
        FactList({evil: evil, "empty": "", "left out": None}),
        ReportTable([evil], [[TableCell(evil, evil, evil, evil)], [evil]], evil),
        Folded(evil, evil),
    ]
    page = Page(html := render(evil, blocks))
    assert "<script" not in html and "49" not in page.text and "left out" not in page.text and "empty" not in page.text
    # title, heading, paragraph, facts 2, table 5, folded 2; the link and classes are attributes
    assert page.text.count(evil) == 12 and page.links == [evil]


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    plot.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["plot", *map(str, words)])
    return arguments.run(arguments)


def test_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_comparison(tmp_path / "c", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]})
    run = folder / "grc" / "seed_0"
    assert command("curves", folder) == 0 and (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.strip() == str(folder / "curves.png")
    for kind, target in (("curves", run), ("gates", folder), ("maps", run), ("flops", folder)):
        assert command(kind, target, "--output", tmp_path / f"{kind}.svg") == 0
        assert "<svg" in (tmp_path / f"{kind}.svg").read_text()
    assert command("report", folder, run) == 0
    assert (folder / "report.html").is_file() and (run / "report.html").is_file()
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["plain", "55.00", "%"] in [row[:3] for row in rows] and ["grc", "65.00", "%"] in [row[:3] for row in rows]
    assert printed.rstrip().endswith(f"written: {run / 'report.html'}")


def test_plot_command_refuses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "plain")
    for words, message in (
        (("gates", run), r"no gates\.json"),
        (("maps", run), r"no feature_maps\.npz"),
        (("maps", run, run), "draws one run"),
        (("curves", tmp_path), "neither a run"),
        (("flops", run), "holds no comparison"),
        (("curves", run, "--output", "x.gif"), r"\.png, \.svg, \.pdf"),
        (("report", run, "--output", "x.html"), "does not apply"),
    ):
        with pytest.raises(ValueError, match=message):
            command(*words)


def test_maps_of_grey_images(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    maps = np.zeros((2, 3, 4, 4))
    np.savez(run / "feature_maps.npz", image=np.zeros((3, 8, 8, 1)), self=maps, memory=maps)
    assert "Feature maps" in read(write_run_report(run)).headings


def test_the_page_of_several_comparisons_ends_with_the_probes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_comparison(tmp_path / name, {"plain": [0.5, 0.6], "convolution": [0.6, 0.7]})
    trainings = [
        {"task": "latch", "memory": m, "arm": arm, "seed": 0, "accuracy": x, "steps": 9, "distances": {"1": x, "3": x}}
        for m, arm, x in (("none", "no memory", 0.25), ("rmt", "within reach", 1.0))
    ]
    probe = {"command": "cached probe rmt", "date": "2026-01-01", "environment": {}, "distance": 3}
    probe |= {
        "memories": ["rmt"],
        "tasks": ["latch"],
        "notes": {"rmt": "a note"},
        "results": [{**t, "chance": 0.25} for t in trainings],
    }
    probe["results"][0]["exact"] = 0.125
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "probe.json").write_text(json.dumps(probe))
    report = read(write_compare_report(tmp_path))
    assert report.headings[-2:] == ["What memories hold", "latch"]
    assert "whole episodes 12.5, 9 steps" in report.text and report.text.count("whole episodes") == 1
    assert "What memories hold" not in read(write_compare_report(tmp_path, ["a", "b"])).headings


def far_content(shares: dict[str, list[dict[int, float]]], **more: object) -> dict:
    """Content of far.json, from shares of right answers by name, seed and distance in segments of 16."""
    arms = {name: ("none", name) if name in ("no memory", "whole text") else (name, "far") for name in shares}
    results = [
        {"task": "latch", "memory": arms[name][0], "arm": arms[name][1], "seed": seed, "solved": 10, "chance": 0.25}
        | {"settings": {"course": {"nearest": 1}}}
        | {"far": {str(d): [share, share, 64] for d, share in of_seed.items()}, "seconds_far": 1.0, "state_bytes": 520}
        for name, seeds in shares.items()
        for seed, of_seed in enumerate(seeds)
    ]
    memories = [name for name, (memory, _) in arms.items() if memory != "none"]
    content = {"command": "cached probe", "date": "2026-01-01", "environment": {}, "far": 10_000, "taps": 3, "rows": 64}
    content |= {"memories": memories, "tasks": ["latch"], "seeds": len(next(iter(shares.values()))), "results": results}
    content |= {"course": {"nearest": 1, "farthest": 10}, "segments": {"latch": 16}, "asked": {"latch": "Which one?"}}
    return content | more


FAR = {
    "no memory": [{1: 0.2, 625: 0.20}, {1: 0.2, 625: 0.30}],
    "whole text": [{1: 1.0}, {1: 1.0}],
    "rmt": [{1: 1.0, 625: 1.0}, {1: 1.0, 20: 0.3}],  # the second one counts as a guess
    "memformer": [{1: 1.0, 20: 0.3}, {1: 1.0, 20: 0.2}],
    "grc_stream": [{1: 1.0, 625: 0.97}, {1: 1.0, 625: 0.99}],
}


def test_a_page_begins_with_what_a_memory_knows_much_later_and_its_twin_does_not(tmp_path: Path) -> None:
    make_comparison(tmp_path / "digits", {"plain": [0.5, 0.6], "convolution": [0.6, 0.7]})
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "far.json").write_text(json.dumps(far_content(FAR)))
    page = write_compare_report(tmp_path)
    report = read(page)
    assert report.headings[1] == "How far memories hold" and "digits_vit" in report.headings[2:]
    first = (
        "Asked 10,000 tokens after the cue, grc_stream is right in 98.0 % (mean of 2 seeds; the worst: 97.0 %), "
        "rmt in 62.5 %; in training cue and question were at most 160 tokens apart."
    )
    second = "The same model without a memory is right in 25.0 %; a guess is right in 25.0 %."
    assert f"{first} {second}" in report.text and "Which one?" in report.text
    text = page.read_text(encoding="utf-8")
    order = ["Asked 10,000 tokens", "<svg", "10,000", "<table", "cached probe", "cached compare"]
    places = [text.index(order[0])]
    for mark in order[1:]:
        places.append(text.index(mark, places[-1]))
    assert report.text.count("against bytes of state") == 1
    write_far_report(tmp_path / "far")
    assert read(tmp_path / "far" / "report.html").headings == ["How far memories hold"]


def test_a_page_of_a_far_probe_of_one_memory_and_seed_that_is_older(tmp_path: Path) -> None:
    content = far_content({"no memory": [{1: 0.2}], "rmt": [{1: 1.0, 625: 1.0}]})
    del content["asked"]
    (tmp_path / "far.json").write_text(json.dumps(content))
    text = read(write_far_report(tmp_path)).text
    assert "Asked 10,000 tokens after the cue, rmt is right in 100.0 %; in training" in text
    assert "without a memory was not asked there; a guess is right in 25.0 %." in text
    assert "against bytes of state" not in text and "worst" not in text
