"""The loading benchmark measures what it says, on images like photographs."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from cached_lab.experiments.benchmarks import loading
from cached_lab.experiments.benchmarks.loading import Row, as_markdown, make_images


def test_made_images_are_like_photographs(tmp_path):
    files = sorted(make_images(tmp_path, 4).rglob("*.jpg"))
    assert len(files) == 4 and len({file.parent for file in files}) == 2
    sizes = [file.stat().st_size for file in files]
    assert min(sizes) > 60_000 and max(sizes) < 180_000
    pixels = [np.asarray(Image.open(io.BytesIO(file.read_bytes()))) for file in files]
    assert all(p.shape == (375, 500, 3) and p.std() > 30 for p in pixels)
    assert not np.array_equal(pixels[0], pixels[1])


def test_rates_are_images_over_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "MODELS", ())
    # A clock of a tenth of a second a look: every batch of 4 seems to take as long.
    looks = iter(range(10**6))
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(looks) / 10)
    rows = loading.run(3, batch=4, workers=(0,), path=str(make_images(tmp_path, 8, (50, 40))))
    assert [row.what for row in rows] == list(loading.PIPELINES)
    assert all(row.images_per_second == pytest.approx(40) and row.low == pytest.approx(row.high) for row in rows)


def test_the_table_says_how_many_workers_a_model_wants():
    rows = [
        Row("plain", 0, 100.0, 90.0, 110.0),
        Row("plain", 2, 190.0, 190.0, 190.0),
        Row("training step of m", None, 450.0, 1, 2),
    ]
    text = as_markdown(rows)
    assert "| plain | 100 | 190 |" in text
    assert f"| training step of m | 450.0 | {math.ceil(450 / 100)} |" in text


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"workers \[-1\] must not be negative"):
        loading.run(1, workers=(-1,))
    with pytest.raises(ValueError, match="has 4 training images, fewer than a batch of 6"):
        loading.run(1, batch=6, path=str(make_images(tmp_path, 4, (50, 40))))
