"""Detectors: Mask R-CNN, Faster R-CNN and RetinaNet of torchvision on a (cached) pyramid backbone with FPN.

Papers: Mask R-CNN (arXiv:1703.06870), Faster R-CNN (arXiv:1506.01497), RetinaNet (arXiv:1708.02002), feature pyramids
(arXiv:1612.03144). Section 4.2 of Cached Transformers (arXiv:2312.12742) puts them on cached PVT; original settings of
PVT: whai362/PVT, detection/configs. The detectors themselves, with their losses, are torchvision's; the backbone is any
timm model with maps at strides 4, 8, 16 and 32.

Images of a batch are resized one by one (shorter side to `min_size`, longer side at most `max_size`) and padded with
zeros, below and to the right, to a common multiple of 32, by torchvision's GeneralizedRCNNTransform. Padding takes part
in attention, and in the update of caches, like any black part of an image. Boxes and masks come back in pixels of the
original images.

Legend: N objects, C channels, H height, W width.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cached_transformers.annotations import shown
from cached_transformers.checks import at_least_one
from cached_transformers.extras import refused_by, require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.memories import OneMemory
from cached_transformers.memories.grc.shared_cache import reset_caches as empty_caches
from cached_transformers.registry import MODELS, unknown_name

from .pretrained import load_backbone

STRIDES = (4, 8, 16, 32)


class Pyramid(nn.Module):
    """Feature maps of a timm backbone and a feature pyramid on them: images (B, 3, H, W) to {level: (B, C, h, w)}.

    Args:
        body: the timm model, pruned to its maps. stages: indices of the maps that are used. widths: their channels.
        channels: C, of every level. extra: makes further levels from the last ones.
    """

    def __init__(
        self, body: nn.Module, stages: Sequence[int], widths: Sequence[int], channels: int, extra: Any
    ) -> None:
        super().__init__()
        operations = require("torchvision.ops", extra="detection")
        self.body, self.stages, self.out_channels = body, list(stages), channels
        self.fpn = operations.FeaturePyramidNetwork(list(widths), channels, extra_blocks=extra)

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        maps = self.body.forward_intermediates(  # type: ignore[operator]
            images_BCHW, indices=self.stages, intermediates_only=True
        )
        levels: dict[str, Tensor] = self.fpn(OrderedDict((str(i), m) for i, m in enumerate(maps)))
        return levels


class Detector(nn.Module):
    """What the detectors here have in common; subclasses say which one of torchvision's they are.

    Args:
        classes: number of classes, without background.
        backbone: name in timm, e.g. "pvt_v2_b0"; it must give maps at strides 4, 8, 16 and 32.
        memory: None, a name, or {"name": ..., option: value}; the backbone's, in every attention layer. Its caches keep
            their height and width; maps of other sizes are interpolated in two dimensions.
        checkpoint: weights of a trained classifier for the backbone: a run folder, or a .safetensors or PyTorch file.
            Its head is dropped; every other tensor must match.
        reset_caches: empty the caches after loading `checkpoint`, as the paper does.
        cache_image_size: (height, width) of the image that caches have a slot a token for; default: the backbone's own.
        min_size, max_size: pixels to which the shorter side is resized, and which the longer side may not exceed.
        pad_to_square: pad every image to max_size x max_size, and not to the largest of its batch. Attention over the
            whole image sees the padding, so that otherwise detections depend on what an image shares its batch with.
            `max_size` must be a multiple of 32.
        fpn_channels: channels of every pyramid level.
        anchor_sizes: side of the anchors of each level in pixels of the resized image; default: torchvision's.
        backbone_options: passed on to timm.create_model (drop_path_rate, ...).
        detector_options: passed on to torchvision's detector (box_score_thresh, rpn_post_nms_top_n_train, ...).

    Raises:
        ValueError: unknown backbone or options, a backbone without pyramid maps, or a checkpoint that does not fit.
    """

    losses: ClassVar[tuple[str, ...]]
    strides: ClassVar[tuple[int, ...]] = STRIDES
    background: ClassVar[int] = 1
    """1 where torchvision's class 0 is the background, and classes are counted from 1."""
    masks: ClassVar[bool] = False
    levels: ClassVar[int] = 5

    def __init__(
        self,
        classes: int,
        backbone: str = "pvt_v2_b0",
        memory: OneMemory | None = None,
        checkpoint: str | None = None,
        reset_caches: bool = True,
        cache_image_size: Sequence[int] | None = None,
        min_size: int = 800,
        max_size: int = 1333,
        pad_to_square: bool = False,
        fpn_channels: int = 256,
        anchor_sizes: Sequence[int] | None = None,
        backbone_options: Mapping[str, Any] | None = None,
        detector_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        at_least_one(classes=classes, fpn_channels=fpn_channels)
        if not 1 <= min_size <= max_size:
            raise ValueError(f"min_size={min_size} must lie in 1..max_size={max_size} pixels")
        if pad_to_square and max_size % self.strides[-1]:
            stride = self.strides[-1]
            raise ValueError(
                f"pad_to_square needs a max_size that is a multiple of {stride}, not {max_size}; take "
                f"{-(-max_size // stride) * stride}"
            )
        if anchor_sizes is not None and (len(anchor_sizes) != self.levels or min(anchor_sizes) <= 0):
            raise ValueError(
                f"anchor_sizes={list(anchor_sizes)} needs one positive size for each of {self.levels} pyramid levels"
            )
        self.classes, self.min_size, self.max_size = classes, min_size, max_size
        body, stages, widths = make_body(backbone, self.strides, dict(backbone_options or {}))
        if memory is not None:
            size = None if cache_image_size is None else _pair("cache_image_size", cache_image_size)
            add_memory(body, memory, **({} if size is None else {"input_size": size}))
        elif cache_image_size is not None:
            raise ValueError(f"cache_image_size={list(cache_image_size)} is of a memory, and memory is null; drop one")
        if checkpoint is not None:
            load_backbone(body, Path(checkpoint).expanduser(), caches=not reset_caches)
            if reset_caches:
                empty_caches(body)
        prune(body, stages)
        options = dict(detector_options or {})
        self._check(options)
        pyramid = Pyramid(body, stages, widths, fpn_channels, self._extra_levels(widths[-1], fpn_channels))
        sizes = {"min_size": min_size, "max_size": max_size}
        if pad_to_square:
            sizes["size_divisible"] = max_size  # torchvision rounds both sides of a batch up to a multiple of it
        with refused_by("torchvision", f"model.detector_options={shown(options)}"):
            self.detector = self._factory()(
                pyramid, classes + self.background, **sizes, **self._anchors(anchor_sizes), **options
            )

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Losses of a batch in training, detections in evaluation.

        Args:
            images: each float (3, H, W) in 0..1, of any size.
            targets: in training, one mapping an image: boxes (N, 4) as corners x1, y1, x2, y2 in pixels, labels long
                (N,) in 0..classes-1 and, for masks, masks uint8 (N, H, W).

        Returns:
            In training {name of a loss: scalar}, for the names in `losses`; their sum is what is minimised. In
            evaluation one mapping an image, best first: boxes (N, 4), scores (N,), labels (N,), and masks (N, 1, H, W)
            as probabilities.

        Raises:
            ValueError: targets are missing in training, or an image is too narrow to be resized.
        """
        for image in images:
            self._check_shape(image)
        if self.training and targets is None:
            raise ValueError("a detector in training needs targets; pass them, or call eval() for detections")
        if not self.training:
            found: list[dict[str, Tensor]] = self.detector(list(images))
            return [{**one, "labels": one["labels"] - self.background} for one in found]
        shifted = [{**target, "labels": target["labels"] + self.background} for target in targets or ()]
        losses: dict[str, Tensor] = self.detector(list(images), shifted)
        return losses

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """timm's own gradient checkpointing, of the backbone."""
        self.detector.backbone.body.set_grad_checkpointing(enabled)  # type: ignore[operator, union-attr]

    def _check_shape(self, image: Tensor) -> None:
        shape = tuple(image.shape)
        if len(shape) != 3 or shape[0] != 3 or min(shape) < 1:
            raise ValueError(f"an image of shape {shape}; a detector takes (3, height, width)")
        scale = min(self.min_size / min(shape[1:]), self.max_size / max(shape[1:]))
        if min(shape[1:]) * scale < 1:
            raise ValueError(
                f"an image of {shape[1]} x {shape[2]} pixels would be resized to less than a pixel, as its longer side "
                f"may have {self.max_size}; crop it"
            )

    def _check(self, options: Mapping[str, Any]) -> None:
        known = [n for kind in self._factory().__mro__ for n in inspect.signature(kind.__init__).parameters]
        ours = {"self", "backbone", "num_classes", "min_size", "max_size", "args", "kwargs", "transform", "rpn"}
        for key in options:
            if key not in known or key in ours:
                names = sorted({n for n in known if n not in ours})
                raise ValueError(unknown_name("option in model.detector_options", key, names))

    def _factory(self) -> Any:
        """torchvision's class."""
        raise NotImplementedError("abstract: a detector names its class in torchvision")

    def _extra_levels(self, width: int, channels: int) -> Any:
        return require("torchvision.ops.feature_pyramid_network", extra="detection").LastLevelMaxPool()

    def _anchors(self, sizes: Sequence[int] | None) -> dict[str, Any]:
        if sizes is None:
            return {}
        return {"rpn_anchor_generator": self._anchor_generator(tuple((int(size),) for size in sizes))}

    def _anchor_generator(self, sizes: tuple[tuple[int, ...], ...]) -> Any:
        anchors = require("torchvision.models.detection.anchor_utils", extra="detection")
        return anchors.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))


@MODELS.register("faster_rcnn", paper="arXiv:1506.01497")
class FasterRCNN(Detector):
    """Faster R-CNN of torchvision on a (cached) pyramid backbone with FPN: boxes. Arguments: see `Detector`."""

    losses = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg")

    def _factory(self) -> Any:
        return require("torchvision.models.detection", extra="detection").FasterRCNN


@MODELS.register("mask_rcnn", paper="arXiv:1703.06870")
class MaskRCNN(Detector):
    """Mask R-CNN of torchvision on a (cached) pyramid backbone with FPN: boxes, masks. Arguments: see `Detector`."""

    losses = (*FasterRCNN.losses, "loss_mask")
    masks = True

    def _factory(self) -> Any:
        return require("torchvision.models.detection", extra="detection").MaskRCNN


@MODELS.register("retinanet", paper="arXiv:1708.02002")
class RetinaNet(Detector):
    """RetinaNet of torchvision on a (cached) pyramid backbone with FPN: boxes. Arguments: see `Detector`.

    Levels P3 to P5 come from the maps at strides 8, 16 and 32, P6 and P7 from the last map by strided convolutions.
    """

    losses = ("classification", "bbox_regression")
    strides = STRIDES[1:]
    background = 0

    def _factory(self) -> Any:
        return require("torchvision.models.detection", extra="detection").RetinaNet

    def _extra_levels(self, width: int, channels: int) -> Any:
        pyramid = require("torchvision.ops.feature_pyramid_network", extra="detection")
        return pyramid.LastLevelP6P7(width, channels)

    def _anchors(self, sizes: Sequence[int] | None) -> dict[str, Any]:
        if sizes is None:
            return {}
        octaves = tuple(tuple(int(size * 2 ** (k / 3)) for k in range(3)) for size in sizes)  # three sizes an octave
        return {"anchor_generator": self._anchor_generator(octaves)}


def make_body(name: str, strides: Sequence[int], options: dict[str, Any]) -> tuple[Any, list[int], list[int]]:
    """A timm model without its head, and indices and channels of its maps at `strides`.

    Raises:
        ValueError: timm does not know it, or it has no such maps.
    """
    timm = require("timm", extra="vision")
    from cached_transformers.integrations.timm import timm_models  # noqa: F401  (registers our models in timm)

    if not timm.is_model(name):
        raise ValueError(f"timm knows no model {name!r} for model.backbone; timm.list_models('pvt*') lists some")
    with refused_by("timm", f"{name} with model.backbone_options={shown(options)}"):
        body = timm.create_model(name, pretrained=False, num_classes=0, **options)
        if getattr(body, "class_token", False) is True:  # PVT; maps do not need it, and the original drops it, too
            body = timm.create_model(name, pretrained=False, num_classes=0, **{"class_token": False, **options})
    facts = list(getattr(body, "feature_info", None) or [])
    by_stride = {int(fact["reduction"]): (index, int(fact["num_chs"])) for index, fact in enumerate(facts)}
    if len(by_stride) < len(facts) or not set(strides) <= set(by_stride) or not hasattr(body, "forward_intermediates"):
        found = ", ".join(str(fact["reduction"]) for fact in facts) or "none"
        raise ValueError(
            f"backbone {name!r} has maps at strides {found}; a detector needs one at each of {list(strides)}, as "
            "pvt_v2_b0, swin_tiny_patch4_window7_224 or resnet50 have"
        )
    return body, [by_stride[s][0] for s in strides], [by_stride[s][1] for s in strides]


def prune(body: Any, stages: Sequence[int]) -> None:
    """Drop what the maps do not need: the head, and a norm behind the last stage (unused parameters stop DDP)."""
    body.prune_intermediate_layers(list(stages), prune_norm=True, prune_head=True)


def _pair(name: str, value: Sequence[int]) -> tuple[int, int]:
    if len(value) != 2 or min(value) < 32:
        raise ValueError(f"{name}={list(value)} must be (height, width), each at least 32 pixels")
    return int(value[0]), int(value[1])
