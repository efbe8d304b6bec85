"""Make torchvision importable beside a torch that its compiled operators were not built for.

Such a pair (a CUDA wheel of one, a CPU wheel of the other) fails at `import torchvision` with "operator
torchvision::nms does not exist", and so do timm and most of transformers. If the compiled operators do not load, nms
and roi_align are registered as plain torch functions. Other operators still fail when they are called.

Shapes: N boxes (R not yet kept or dropped), K regions, B images, C channels, Y x X feature map, P x Q bins of a
region, S samples over all bins, 4 corners of a sample.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ensure_torchvision", "nms", "roi_align"]

Operators = Literal["native", "stand-in", "absent"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    # Declared only: torchvision attaches a shape rule to the name at import.
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)


def ensure_torchvision() -> Operators:
    """Import torchvision, with its own operators if they load; see `prepare_torchvision`. Repeated calls do nothing."""
    operators = prepare_torchvision()
    if operators == "stand-in":
        importlib.import_module("torchvision")
        # Let torchvision find its operators. During its import this would attach rules to missing operators.
        for name in ("torchvision.extension", "torchvision.ops.roi_align"):
            vars(importlib.import_module(name))["_has_ops"] = lambda: True
    return operators


@functools.cache
def prepare_torchvision() -> Operators:
    """Prepare the import of torchvision; `ensure_torchvision` completes it.

    Returns:
        "native": the compiled operators are loaded. "stand-in": the functions of this file are registered, after a
        warning. "absent": torchvision is not installed.
    """
    spec = find_spec("torchvision")
    if spec is None:
        return "absent"
    failure = _load_compiled_operators(spec.submodule_search_locations or [])
    if failure is None:
        return "native"
    _register_stand_ins()
    warnings.warn(
        f"torchvision {importlib.metadata.version('torchvision')} was not built for torch {torch.__version__}: its "
        f"compiled operators do not load ({failure}), and nms and roi_align are replaced by slower functions; install "
        "the torchvision that matches your torch (https://github.com/pytorch/vision#installation)",
        stacklevel=2,
    )
    return "stand-in"


def nms(boxes_N4: Tensor, scores_N: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression, as `torchvision.ops.nms`; equal scores keep their order."""
    boxes = importlib.import_module("torchvision.ops.boxes")
    rest_R = scores_N.argsort(descending=True, stable=True)
    kept: list[Tensor] = []
    while len(rest_R):
        kept.append(rest_R[:1])
        overlap_R = boxes.box_iou(boxes_N4[rest_R[:1]], boxes_N4[rest_R[1:]])[0]
        rest_R = rest_R[1:][~(overlap_R.double() > iou_threshold)]  # in float64, to compare with a Python float
    return torch.cat(kept) if kept else rest_R


def roi_align(
    input_BCYX: Tensor,
    rois_K5: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Mean of bilinear samples in every bin of every region (Mask R-CNN, arXiv:1703.06870, section 3).

    Arguments and conventions are those of `torchvision.ops.roi_align`; `rois_K5` holds image index and corners. It is
    differentiable in the feature map.
    """
    if input_BCYX.dim() != 4 or rois_K5.dim() != 2 or rois_K5.shape[1] != 5:
        shapes = f"input {tuple(input_BCYX.shape)} and rois {tuple(rois_K5.shape)}"
        raise ValueError(f"roi_align got {shapes}; it takes input (B, C, Y, X) and rois (K, 5)")
    batch, channels, height, width = input_BCYX.shape
    dtype = torch.promote_types(torch.promote_types(input_BCYX.dtype, rois_K5.dtype), torch.float32)
    corners_K4 = rois_K5[:, 1:].detach().to(dtype) * spatial_scale - (0.5 if aligned else 0.0)
    x_axis = _bins_of(corners_K4[:, 0], corners_K4[:, 2], pooled_width, sampling_ratio, aligned)
    y_axis = _bins_of(corners_K4[:, 1], corners_K4[:, 3], pooled_height, sampling_ratio, aligned)

    # Bins have unequal numbers of samples, so all samples are in one flat list, by region and bin.
    bins = pooled_height * pooled_width
    per_bin_K = y_axis.samples_K * x_axis.samples_K
    region_S = torch.arange(len(rois_K5), device=rois_K5.device).repeat_interleave(per_bin_K * bins)
    place_S = torch.arange(len(region_S), device=rois_K5.device) - _starts(per_bin_K * bins)[region_S]
    bin_S, sample_S = place_S // per_bin_K[region_S], place_S % per_bin_K[region_S]
    row_S, column_S = sample_S // x_axis.samples_K[region_S], sample_S % x_axis.samples_K[region_S]
    y_S2, y_weight_S2 = _neighbours(y_axis.coordinate(region_S, bin_S // pooled_width, row_S), height)
    x_S2, x_weight_S2 = _neighbours(x_axis.coordinate(region_S, bin_S % pooled_width, column_S), width)

    image_S = rois_K5[:, 0].long()[region_S]
    pixel_S4 = ((image_S[:, None] * height + y_S2)[:, :, None] * width + x_S2[:, None, :]).flatten(1)
    weight_S4 = (y_weight_S2[:, :, None] * x_weight_S2[:, None, :]).flatten(1) / per_bin_K[region_S, None]
    pooled = F.embedding_bag(
        pixel_S4.flatten(),
        input_BCYX.to(dtype).permute(0, 2, 3, 1).reshape(batch * height * width, channels),
        offsets=_starts(per_bin_K.repeat_interleave(bins)) * 4,
        mode="sum",
        per_sample_weights=weight_S4.flatten(),
    )
    grid = (len(rois_K5), pooled_height, pooled_width, channels)
    return pooled.reshape(grid).permute(0, 3, 1, 2).to(input_BCYX.dtype)


class _Bins(NamedTuple):
    """The bins of every region along one axis."""

    start_K: Tensor
    size_K: Tensor
    samples_K: Tensor

    def coordinate(self, region_S: Tensor, bin_S: Tensor, sample_S: Tensor) -> Tensor:
        """Return the position of each sample in pixels: the middles of equal parts of the bin."""
        part_S = (sample_S.to(self.size_K.dtype) + 0.5) / self.samples_K[region_S]
        return self.start_K[region_S] + (bin_S + part_S) * self.size_K[region_S]


def _bins_of(low_K: Tensor, high_K: Tensor, bins: int, sampling_ratio: int, aligned: bool) -> _Bins:
    extent_K = high_K - low_K if aligned else (high_K - low_K).clamp(min=1.0)
    size_K = extent_K / bins
    # An inside-out, infinite or NaN region has no samples and gives 0.
    adaptive_K = size_K.ceil().nan_to_num(posinf=0.0).clamp(min=0)
    samples_K = torch.full_like(size_K, sampling_ratio) if sampling_ratio > 0 else adaptive_K
    return _Bins(low_K, size_K, samples_K.long())


def _neighbours(coordinate_S: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the two pixels around each coordinate and their bilinear weights: 0 beyond one pixel outside the map."""
    inside_S = (coordinate_S >= -1) & (coordinate_S <= size)
    # where() also keeps a NaN from becoming an index.
    clamped_S = torch.where(inside_S, coordinate_S, 0.0).clamp(0, size - 1)
    low_S = clamped_S.floor()
    pixel_S2 = torch.stack((low_S, (low_S + 1).clamp(max=size - 1)), dim=1).long()
    high_weight_S = clamped_S - low_S
    return pixel_S2, torch.stack((1 - high_weight_S, high_weight_S), dim=1) * inside_S[:, None]


def _starts(counts: Tensor) -> Tensor:
    """Return the starts of consecutive runs of the given lengths."""
    return counts.cumsum(0) - counts


def _load_compiled_operators(folders: Sequence[str]) -> str | None:
    """Load the library of torchvision (`_C`, from 0.29 on `_C_stable`); return the reason if it does not load."""
    files = [file for folder in folders for file in sorted(Path(folder).glob("_C*"))]
    libraries = [file for file in files if file.name.endswith(tuple(EXTENSION_SUFFIXES))]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError as error:
        return str(error.__cause__ or error).partition("\n")[0]
    return None if libraries else "it has none"


@functools.cache
def _register_stand_ins() -> torch.library.Library:
    """Define the operators; the cache keeps the library, and with it the definitions, alive."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    return library
