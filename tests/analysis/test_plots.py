"""Figures hold the numbers that they were given, in the colours that were promised."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cached_lab.experiments.reports.figures import curves
from cached_lab.experiments.reports.figures.paper import FormPoint, accuracy_against_flops
from cached_lab.experiments.reports.figures.style import REFERENCE, SERIES, as_svg, looks, save

pytest.importorskip("matplotlib")


def records(split: str, values: dict[int, float], metric: str = "accuracy") -> list[dict]:
    return [{"step": step, "split": split, metric: value} for step, value in values.items()]


def test_looks_are_distinct_and_long_curves_averaged() -> None:
    names = ["grc", "plain", *(f"v{i}" for i in range(16))]
    result = looks(names, "plain")
    assert result["plain"].colour == REFERENCE and [result[n].colour for n in ("grc", "v0")] == SERIES[:2]
    assert len({(look.colour, str(look.dash)) for look in result.values()}) == len(names)
    assert all(looks(names[:n], "plain") == {k: result[k] for k in names[:n]} for n in range(len(names)))
    values = {step: float(step) for step in range(1, 1201)} | {1201: float("nan")}
    figure = curves.learning_curves({"grc": [records("train", values, "loss")]}, metric="loss")
    (line,) = figure.axes[0].lines
    assert len(line.get_xdata()) == curves.MAX_POINTS
    assert line.get_xdata()[0] == pytest.approx(5.5) and line.get_ydata().tolist() == pytest.approx(line.get_xdata())
    with pytest.raises(ValueError, match="no curve to draw"):
        curves.learning_curves({"grc": [records("test", {1: 1.0})]})


def test_learning_curves_show_mean_and_range_at_common_steps() -> None:
    seeds = [records("validation", {10: 0.2, 20: 0.4, 30: 0.9}), records("validation", {10: 0.4, 20: 0.8})]
    figure = curves.learning_curves({"plain": seeds, "grc": seeds[:1]}, reference="plain")
    (ax,) = figure.axes  # no train loss: no panel for it
    assert ax.get_title(loc="left") == "validation accuracy"
    plain, grc = ax.lines
    assert plain.get_xdata().tolist() == [10, 20] and plain.get_ydata().tolist() == pytest.approx([0.3, 0.6])
    assert grc.get_ydata().tolist() == [0.2, 0.4, 0.9]
    corners = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert corners.min() == 0.2 and corners.max() == 0.8
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["plain", "grc"]
    assert [plain.get_color(), grc.get_color()] == [REFERENCE, SERIES[0]]


def test_answers_by_distance_show_the_mean_and_range_of_seeds() -> None:
    lines = {"no memory": {16: [0.25]}, "rmt": {160: [0.5, 1.0], 16: [1.0, 1.0]}}
    (ax,) = curves.answers_by_distance(lines, 0.25, 80, "tokens since the cue", log=True).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn["rmt"] == [100.0, 75.0] and drawn["no memory"] == [25.0] and drawn["a guess"] == [25.0, 25.0]
    assert ax.get_xscale() == "log" and ax.collections[-1].get_paths()[0].vertices[:, 1].min() == 50


def test_variants_against_flops() -> None:
    points = [FormPoint("plain", "", 1e9, [0.89, 0.91]), FormPoint("grc", "", 1.1e9, [0.93])]
    points += [FormPoint(f"v{i}", "", 5e10 + i, [0.5]) for i in range(6)]
    (ax,) = accuracy_against_flops(points, "accuracy", "one forward pass", "plain").axes
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert ax.get_xscale() == "log" and legend == [p.backbone for p in points]
    marks = [line for line in ax.lines if line.get_marker() in ("o", "s") and len(line.get_xdata())]
    assert [line.get_xdata()[0] for line in marks] == [p.operations for p in points]
    assert [line.get_ydata()[0] for line in marks[:2]] == pytest.approx([90, 93])
    assert [line.get_color() for line in marks[:2]] == [REFERENCE, SERIES[0]]
    assert marks[1].get_marker() == "o" and marks[7].get_marker() == "s"  # the same colour with another shape


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_save_is_reproducible(tmp_path: Path, suffix: str) -> None:
    contents = []
    for name in ("a", "b"):
        figure = accuracy_against_flops([FormPoint("plain", "", 1e9, [0.89, 0.91])], "accuracy", "")
        contents.append(save(figure, tmp_path / "new" / f"{name}.{suffix}").read_bytes())
    assert contents[0] == contents[1] and contents[0][:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_svg_of_a_page_is_escaped_and_names_only_its_own_parts() -> None:
    name = 'a<b & "$x_1$" </svg>'
    svg = as_svg(accuracy_against_flops([FormPoint(name, "", 1e9, [0.89, 0.91])], "accuracy", ""))
    root = ET.fromstring(svg)  # well-formed, so nothing of the name got out
    assert any(name in "".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    used = {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)}
    assert used and used <= set(re.findall(r'\sid="([^"]+)"', svg)) and "<metadata" not in svg
