"""The stand-ins against slow scalar twins; the guard in interpreters of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cached_transformers import torchvision_guard
from cached_transformers.torchvision_guard import nms, prepare_torchvision, roi_align

SOURCE = Path(__file__).resolve().parents[2] / "src"


def slow_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: -scores[i].item())  # sorted() keeps the order of ties
    kept: list[int] = []
    for i in order:
        if all(slow_iou(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in kept):
            kept.append(i)
    return kept


def slow_iou(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


def slow_sample(image_CYX: Tensor, y: float, x: float) -> Tensor:
    _, height, width = image_CYX.shape
    if y < -1 or y > height or x < -1 or x > width:
        return torch.zeros_like(image_CYX[:, 0, 0])
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    below, after = y - top, x - left
    upper = (1 - after) * image_CYX[:, top, left] + after * image_CYX[:, top, right]
    lower = (1 - after) * image_CYX[:, bottom, left] + after * image_CYX[:, bottom, right]
    return (1 - below) * upper + below * lower


def slow_roi_align(
    images: Tensor, rois: Tensor, scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    regions = []
    for image, x1, y1, x2, y2 in rois.tolist():
        shift = 0.5 if aligned else 0.0
        x1, y1, x2, y2 = (value * scale - shift for value in (x1, y1, x2, y2))
        extent_y, extent_x = y2 - y1, x2 - x1
        if not aligned:
            extent_y, extent_x = max(extent_y, 1.0), max(extent_x, 1.0)
        rows = sampling_ratio if sampling_ratio > 0 else max(math.ceil(extent_y / height), 0)
        columns = sampling_ratio if sampling_ratio > 0 else max(math.ceil(extent_x / width), 0)
        for p in range(height):
            for q in range(width):
                total = torch.zeros_like(images[0, :, 0, 0])
                for i in range(rows):
                    for j in range(columns):
                        y = y1 + (p + (i + 0.5) / rows) * extent_y / height
                        x = x1 + (q + (j + 0.5) / columns) * extent_x / width
                        total = total + slow_sample(images[int(image)], y, x)
                regions.append(total / max(rows * columns, 1))
    return torch.stack(regions).reshape(len(rois), height, width, -1).permute(0, 3, 1, 2)


def random_boxes(count: int, extent: float, size: float) -> Tensor:
    corner = torch.rand(count, 2, dtype=torch.float64) * extent
    return torch.cat((corner, corner + torch.rand(count, 2, dtype=torch.float64) * size), dim=1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
def test_nms_equals_slow_twin(threshold: float) -> None:
    for _ in range(5):
        boxes = random_boxes(60, extent=20.0, size=20.0)
        boxes[40:] = boxes[:20]  # the same boxes again
        scores = torch.randint(0, 12, (60,), dtype=torch.float64)  # many ties
        assert nms(boxes, scores, threshold).tolist() == slow_nms(boxes, scores, threshold)


def test_nms_keeps_a_box_that_only_a_dropped_box_overlaps() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 1], [2.0, 0, 6, 1], [4.0, 0, 8, 1], [6.0, 0, 10, 1]])
    assert nms(boxes, torch.tensor([0.9, 0.8, 0.7, 0.6]), 0.2).tolist() == [0, 2]


def test_nms_compares_with_the_threshold_as_it_was_given() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 1], [0.0, 0, 3, 1]])  # overlap 0.3 in float32, which is above 0.3
    assert nms(boxes, torch.tensor([1.0, 0.5]), 0.3).tolist() == [0]
    assert nms(boxes.double(), torch.tensor([1.0, 0.5]), 0.3).tolist() == [0, 1]


def test_nms_without_boxes_and_with_empty_ones() -> None:
    assert nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []
    assert nms(torch.ones(3, 4), torch.tensor([1.0, 3.0, 2.0]), 0.5).tolist() == [1, 2, 0]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling_ratio", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3)])
def test_roi_align_equals_slow_twin(aligned: bool, sampling_ratio: int, height: int, width: int) -> None:
    images = torch.randn(2, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    # Inside, beyond every side, of no extent, inside out, on the border, and far outside.
    boxes = torch.cat((random_boxes(4, 14.0, 8.0), random_boxes(4, 20.0, 20.0) - 6.0))
    special = [[3, 3, 3, 3], [8, 8, 4, 4], [0, 0, 14, 18], [-40, -40, -30, -30], [-2, -2, 16, 20]]
    boxes = torch.cat((boxes, torch.tensor(special, dtype=torch.float64)))
    rois = torch.cat((torch.randint(0, 2, (len(boxes), 1)).double(), boxes), dim=1)
    arguments = (rois, 0.5, height, width, sampling_ratio, aligned)

    fast, slow = roi_align(images, *arguments), slow_roi_align(images, *arguments)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    weight = torch.randn_like(slow)
    (fast_gradient,) = torch.autograd.grad(fast, images, weight)
    (slow_gradient,) = torch.autograd.grad(slow, images, weight)
    assert slow_gradient.abs().max() > 0.1
    torch.testing.assert_close(fast_gradient, slow_gradient, rtol=0, atol=1e-12)


def test_roi_align_without_regions_keeps_the_graph() -> None:
    images = torch.randn(1, 2, 4, 4, requires_grad=True)
    pooled = roi_align(images, torch.zeros(0, 5), 1.0, 3, 2, 2, True)
    assert pooled.shape == (0, 2, 3, 2)
    pooled.sum().backward()
    assert images.grad is not None and not images.grad.any()


@pytest.mark.parametrize("sampling_ratio", [2, -1])
def test_roi_align_of_a_diverged_box_is_zero_and_others_are_untouched(sampling_ratio: int) -> None:
    images = torch.randn(1, 2, 6, 6)
    good = torch.tensor([[0.0, 1, 1, 4, 4]])
    for broken in (float("nan"), float("inf")):
        rois = torch.cat((torch.tensor([[0.0, 0, 0, broken, 3]]), good))
        pooled = roi_align(images, rois, 1.0, 1, 3, sampling_ratio, True)
        assert not pooled[0].any()
        torch.testing.assert_close(pooled[1:], roi_align(images, good, 1.0, 1, 3, sampling_ratio, True))


def test_roi_align_of_low_precision_maps_computes_in_float32() -> None:
    images = torch.randn(1, 2, 6, 6).bfloat16()
    rois = torch.tensor([[0.0, 0.3, 0.7, 4.9, 5.2]])
    pooled = roi_align(images, rois, 1.0, 2, 2, 2, True)
    assert pooled.dtype == torch.bfloat16
    assert torch.equal(pooled, roi_align(images.float(), rois, 1.0, 2, 2, 2, True).bfloat16())


def test_roi_align_refuses_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"rois \(2, 4\).*rois \(K, 5\)"):
        roi_align(torch.zeros(1, 1, 4, 4), torch.zeros(2, 4), 1.0, 2, 2, 2, True)


def refuse(*_: object) -> None:
    raise AssertionError("nothing may be registered or patched here")


@pytest.fixture
def inert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that has not answered yet and must not change anything."""
    monkeypatch.setattr(torchvision_guard, "prepare_torchvision", prepare_torchvision.__wrapped__)
    monkeypatch.setattr(torchvision_guard, "_register_stand_ins", refuse)


@pytest.mark.usefixtures("inert")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_C", "_C_stable"])  # before torchvision 0.29, and since
def test_native_operators_leave_everything_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / f"{name}{torchvision_guard.EXTENSION_SUFFIXES[0]}"
    library.touch()
    spec = ModuleSpec("torchvision", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(torchvision_guard, "find_spec", lambda name: spec)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert torchvision_guard.ensure_torchvision() == "native"
    assert loaded == [str(library)]


@pytest.mark.usefixtures("inert")
@pytest.mark.filterwarnings("error")
def test_absent_torchvision_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_guard, "find_spec", lambda name: None)
    assert torchvision_guard.ensure_torchvision() == "absent"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=SOURCE, capture_output=True, text=True, check=False)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_other_libraries_import_after_it() -> None:
    """Whether or not the installed torchvision fits the installed torch, and even after it failed to import."""
    done = run_python("""
import contextlib, warnings
with contextlib.suppress(RuntimeError):
    import torchvision
from cached_transformers.torchvision_guard import ensure_torchvision
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    answers = {ensure_torchvision() for _ in range(3)}
ours = [w for w in caught if "was not built for torch" in str(w.message)]
assert len(answers) == 1 and len(ours) == (answers == {"stand-in"}), (answers, ours)

import timm, torch, torchvision
from transformers import ViTConfig, ViTModel
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
assert model(torch.zeros(1, 3, 32, 32)).isfinite().all()
vit = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32))
assert vit(torch.zeros(1, 3, 32, 32)).last_hidden_state.isfinite().all()

boxes, scores = torch.tensor([[0.0, 0, 4, 4], [1, 0, 4, 4], [6, 6, 8, 8]]), torch.tensor([0.5, 0.9, 0.1])
assert torchvision.ops.nms(boxes, scores, 0.5).tolist() == [1, 2]
ramp = torch.arange(8.0).expand(1, 1, 8, 8).clone().requires_grad_()
pooled = torchvision.ops.roi_align(ramp, [torch.tensor([[1.0, 1, 5, 5]])], 2, sampling_ratio=2, aligned=True)
torch.testing.assert_close(pooled[0, 0], torch.tensor([[1.5, 3.5], [1.5, 3.5]]))
pooled.sum().backward()
torch.testing.assert_close(ramp.grad.sum(), torch.tensor(4.0))
print(*answers)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"native", "stand-in"}
