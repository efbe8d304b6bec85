"""Make torchvision importable beside a torch that its compiled operators were not built for.

Such a pair (a CUDA wheel of one, a CPU wheel of the other) fails at `import torchvision` with "operator
torchvision::nms does not exist", and so do timm and most of transformers. If the compiled operators do not load, nms
and roi_align are registered as plain torch functions. Other operators still fail when they are called.

Shapes: N boxes (R not yet kept or dropped), K regions, B images, C channels, Y x X feature map.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

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


def roi_align(input_BCYX: Tensor, rois_K5: Tensor, *options: Any) -> Tensor:
    """Mean of bilinear samples in every bin of every region (Mask R-CNN, arXiv:1703.06870, section 3).

    It is torchvision's own function in Python, in float32 and not compiled. A region with NaN or infinities, which
    have no index, is replaced by the corner of the image.
    """
    slow = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__
    rois_K5 = rois_K5.nan_to_num(0.0, 0.0, 0.0)
    dtype = torch.promote_types(torch.promote_types(input_BCYX.dtype, rois_K5.dtype), torch.float32)
    pooled: Tensor = slow(input_BCYX.to(dtype), rois_K5.to(dtype), *options)
    return pooled.to(input_BCYX.dtype)


def _load_compiled_operators(folders: Sequence[str]) -> str | None:
    """Load the library of torchvision; return the reason if it does not load."""
    details = (ExtensionFileLoader, EXTENSION_SUFFIXES)
    for folder in folders:
        spec = FileFinder(folder, details).find_spec("_C")
        if spec is None or spec.origin is None:
            continue
        try:
            torch.ops.load_library(spec.origin)
        except OSError as error:
            return str(error.__cause__ or error).partition("\n")[0]
        return None
    return "it has none"


@functools.cache
def _register_stand_ins() -> torch.library.Library:
    """Define the operators; the cache keeps the library, and with it the definitions, alive."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    return library
