"""Every kind of image file that collections hold, and those that cannot be read."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from data.pictures import encoded, saved, write_files
from PIL import Image

from cached_lab.data import BadFile
from cached_lab.data.image_files import open_picture
from cached_lab.tasks.classification.images.class_folders import ImageFolder

RAMP = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def opened(content: bytes, channels: int = 3) -> np.ndarray:
    return np.asarray(open_picture(content, "file", channels))


def test_grey_becomes_three_equal_channels():
    pixels = opened(saved(Image.fromarray(RAMP)))
    assert pixels.shape == (8, 8, 3) and all(np.array_equal(pixels[..., c], RAMP) for c in range(3))


def test_sixteen_bits_are_scaled_not_cut_off():
    wide = (RAMP.astype(np.uint16) * 257).reshape(8, 8)
    content = saved(Image.fromarray(wide))
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode.startswith("I")
    assert np.array_equal(opened(content)[..., 0], RAMP)
    assert np.array_equal(opened(content, channels=1), RAMP)


def test_palette_cmyk_and_transparency():
    colour = Image.new("RGB", (4, 4), (200, 40, 90))
    assert opened(saved(colour.quantize(4))).reshape(-1, 3).tolist() == [[200, 40, 90]] * 16
    cmyk = opened(saved(colour.convert("CMYK"), "JPEG", quality=100))
    assert cmyk.shape == (4, 4, 3) and np.abs(cmyk.astype(int) - [200, 40, 90]).max() < 8
    clear = Image.new("RGBA", (4, 4), (200, 40, 90, 0))
    assert opened(saved(clear)).reshape(-1, 3).tolist() == [[200, 40, 90]] * 16
    one_bit = Image.fromarray(RAMP > 100)
    assert np.array_equal(opened(saved(one_bit), channels=1), np.where(RAMP > 100, 255, 0))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (40, 7)])
def test_tiny_and_long_images(tmp_path, size):
    write_files(tmp_path, {f"{name}/0.png": encoded(size=size) for name in "ab"})
    options = {"path": tmp_path, "image_size": 16, "validation_fraction": 0, "test_fraction": 0}
    for more in ({}, {"crop_ratio": 0.875}, {"augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 1.0}}):
        image_CHW, _ = ImageFolder("train", **options, **more)[0]
        assert image_CHW.shape == (3, 16, 16) and image_CHW.isfinite().all()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "of no image format"),
        (encoded(size=(64, 64), kind="JPEG")[:-900], "truncated"),
        (encoded(size=(64, 64))[:3000], "truncated"),
    ],
)
def test_files_that_cannot_be_read_are_named(content, reason):
    with pytest.raises(BadFile, match="shard:image cannot be used as an image: ") as found:
        open_picture(content, "shard:image")
    assert reason in str(found.value) and "data.bad_files=skip" in str(found.value)
    again = pickle.loads(pickle.dumps(found.value))
    assert (again.file, again.reason, str(again)) == (found.value.file, found.value.reason, str(found.value))


def test_pixels_of_unknown_range_are_refused():
    with pytest.raises(BadFile, match="floating-point numbers, whose range is not known"):
        open_picture(saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "x.tif")
