"""Figures hold the numbers that they were given, in the colours that were promised."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from cached_lab.experiments.reports.figures import curves, maps, scores
from cached_lab.experiments.reports.figures.paper import FormPoint, accuracy_against_flops
from cached_lab.experiments.reports.figures.style import (
    COLOURS,
    REFERENCE,
    SERIES,
    inline_svg,
    looks,
    save,
)

pytest.importorskip("matplotlib")


def records(split: str, values: dict[int, float], metric: str = "accuracy") -> list[dict]:
    return [{"step": step, "split": split, metric: value} for step, value in values.items()]


def test_looks_are_stable_and_distinct() -> None:
    names = ["grc", "plain", *(f"v{i}" for i in range(16))]
    result = looks(names, "plain")
    assert (
        result["plain"].colour == REFERENCE and result["grc"].colour == SERIES[0] and result["v0"].colour == SERIES[1]
    )
    assert len({(look.colour, str(look.dash)) for look in result.values()}) == len(names)
    assert all(looks(names[:n], "plain") == {k: result[k] for k in names[:n]} for n in range(len(names)))


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


def test_one_variant_shows_both_splits() -> None:
    lines = [r | {"loss": 1.0} for split in ("train", "validation") for r in records(split, {1: 0.1, 2: 0.2})]
    figure = curves.learning_curves({"grc": [lines]})
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["loss", "accuracy"]
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["train", "validation"]


def test_long_curves_are_averaged_in_bins_and_gaps_skipped() -> None:
    values = {step: float(step) for step in range(1, 1201)} | {1201: float("nan")}
    figure = curves.learning_curves({"grc": [records("train", values, "loss")]}, metric="loss")
    (line,) = figure.axes[0].lines
    assert len(line.get_xdata()) == curves.MAX_POINTS
    assert line.get_xdata()[0] == pytest.approx(5.5) and line.get_ydata().tolist() == pytest.approx(line.get_xdata())


def test_no_curve() -> None:
    with pytest.raises(ValueError, match="no curve to draw"):
        curves.learning_curves({"grc": [[{"step": 1, "split": "test", "accuracy": 1.0}]]})


def test_feature_maps_place_every_map() -> None:
    generator = np.random.default_rng(0)
    image, own, memory = generator.random((5, 8, 8, 1)), generator.random((7, 5, 4, 4)), generator.random((7, 5, 4, 4))
    figure = maps.feature_maps(image, own, memory, images=2, layers=3)
    axes = np.array(figure.axes).reshape(2, 7)
    assert [ax.get_title() for ax in axes[0]][:3] == ["input", "self, layer 1", "memory, layer 1"]
    assert axes[0, 6].get_title() == "memory, layer 7"
    assert np.array_equal(axes[1, 3].images[0].get_array(), own[3, 1])
    assert np.array_equal(axes[1, 6].images[0].get_array(), memory[6, 1])
    assert np.array_equal(axes[1, 0].images[0].get_array(), image[1, ..., 0])


def test_feature_maps_refuse() -> None:
    image, data = np.zeros((2, 8, 8, 3)), np.zeros((3, 2, 4, 4))
    for bad in (
        (image[..., :2], data, data),
        (image, data, data[:2]),
        (image[:1], data, data),
        (image, data[0], data[0]),
    ):
        with pytest.raises(ValueError, match="feature maps need"):
            maps.feature_maps(*bad)


def test_variants_against_flops() -> None:
    points = [FormPoint("plain", "", 1e9, [0.89, 0.91]), FormPoint("grc", "", 1.1e9, [0.93])]
    points += [FormPoint(f"v{i}", "", 5e10 + i, [0.5]) for i in range(6)]
    (ax,) = accuracy_against_flops(points, "accuracy", "one forward pass", "plain").axes
    assert ax.get_xscale() == "log" and [t.get_text() for t in ax.get_legend().get_texts()] == [
        p.backbone for p in points
    ]
    marks = [line for line in ax.lines if line.get_marker() in ("o", "s") and len(line.get_xdata())]
    assert [line.get_xdata()[0] for line in marks] == [p.operations for p in points]
    assert [line.get_ydata()[0] for line in marks[:2]] == pytest.approx([90, 93])
    assert [line.get_color() for line in marks[:2]] == [REFERENCE, SERIES[0]]
    assert marks[1].get_marker() == "o" and marks[7].get_marker() == "s"  # the same colour with another shape


def test_differences() -> None:
    (ax,) = scores.differences(
        [scores.DifferenceBar("grc", 0.01, -0.005, 0.025), scores.DifferenceBar("one", -0.02)], "plain"
    ).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["grc", "one"]
    assert [t.get_text() for t in ax.texts] == ["+1.00", "\N{MINUS SIGN}2.00"]
    assert ax.lines[1].get_xdata() == pytest.approx([-0.5, 2.5])
    assert (
        "better to the left" in scores.differences([scores.DifferenceBar("a", 1.0)], "b", "loss").axes[0].get_xlabel()
    )
    with pytest.raises(ValueError, match="at least one"):
        scores.differences([], "plain")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_save_is_reproducible(tmp_path: Path, suffix: str) -> None:
    contents = []
    for name in ("a", "b"):
        figure = scores.differences([scores.DifferenceBar("grc", 0.01, 0.0, 0.02)], "plain")
        contents.append(save(figure, tmp_path / "new" / f"{name}.{suffix}").read_bytes())
    assert contents[0] == contents[1] and contents[0][:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
        save(figure, tmp_path / "figure.gif")


def test_inline_svg_is_themed_unique_and_escaped() -> None:
    name = 'a<b & "$x_1$" </svg>'
    figure = scores.differences([scores.DifferenceBar(name, 0.01, 0.0, 0.02)], "plain")
    first, second = (inline_svg(figure, identifier, f"about {name}") for identifier in ("one", "two"))
    root = ET.fromstring(first)  # well-formed, so nothing of the name got out
    assert root.get("aria-label") == f"about {name}"
    assert any(name in "".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    assert not any(light in first for light, _ in COLOURS.values()) and "var(--c1)" in first
    assert "<style" not in first and "<metadata" not in first
    ids = [set(re.findall(r'\sid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', first))
    assert {a or b for a, b in used} <= ids[0]


def test_loss_by_place_has_a_line_for_each_way_of_treating_the_memory():
    lines = {"carry": [(0, 0, 3.0), (1, 2, 2.5), (3, 6, 2.0)], "reset": [(0, 0, 3.0), (1, 2, 2.8), (3, 6, 2.8)]}
    (axes,) = curves.loss_by_place(lines).axes
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]
    assert [y for _, y in drawn] == [[3.0, 2.5, 2.0], [3.0, 2.8, 2.8]]
    assert drawn[0][0] == pytest.approx([1, 6**0.5, 28**0.5]) and axes.get_xscale() == "log"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"carry", "reset"}
