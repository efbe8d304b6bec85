"""Detectors: Mask R-CNN, Faster R-CNN and RetinaNet of torchvision on a (cached) pyramid backbone with FPN.

Papers: Mask R-CNN (arXiv:1703.06870), Faster R-CNN (arXiv:1506.01497), RetinaNet (arXiv:1708.02002), feature pyramids
(arXiv:1612.03144). Section 4.2 of Cached Transformers (arXiv:2312.12742) uses cached PVT; original settings of PVT:
whai362/PVT, detection/configs. Detectors and losses are torchvision's; the backbone is any timm model with maps at
strides 4, 8, 16 and 32.

torchvision resizes each image (shorter side to `min_size`, longer side at most `max_size`) and pads a batch with zeros,
below and to the right, to a common multiple of 32. Attention and the update of caches treat padding as a black part of
an image. Boxes and masks come back in pixels of the original images.

Legend: N objects, C channels, H height, W width.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from cached_lab.training.stored_weights import head_names, read_weights
from cached_transformers.annotations import shown
from cached_transformers.checks import at_least_one
from cached_transformers.extras import refused_by, require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.memories import OneMemory
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights
from cached_transformers.registry import MODELS, unknown_name

STRIDES = (4, 8, 16, 32)


class Pyramid(nn.Module):
    """Feature pyramid on the maps of a timm backbone: images (B, 3, H, W) to {level: (B, C, h, w)}.

    Args:
        body: the timm model, pruned to its maps. stages: indices of the maps. widths: their channels.
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
    """Base of the detectors.

    Args:
        classes: number of classes, without background.
        backbone: name in timm, e.g. "pvt_v2_b0"; it must give maps at strides 4, 8, 16 and 32.
        memory: None, a name, or {"name": ..., option: value}; the backbone's, in every attention layer. Its caches keep
            their height and width; maps of other sizes are interpolated in two dimensions.
        checkpoint: weights of a trained classifier for the backbone: a run folder, or a .safetensors or PyTorch file.
            Its head and caches are dropped; every other tensor must match.
        cache_image_size: (height, width) of an image with one token per slot; default: the backbone's own.
        min_size, max_size: pixels of the resized shorter side, and most pixels of the longer side.
        pad_to_square: pad every image to max_size x max_size instead of the largest of its batch. Global attention sees
            the padding, so without it detections depend on the rest of the batch. `max_size` must be a multiple of 32.
        fpn_channels: channels of every pyramid level.
        anchor_sizes: side of the anchors of each of five levels in pixels of the resized image; default: torchvision's.
        backbone_options: passed on to timm.create_model (drop_path_rate, ...).
        detector_options: passed on to torchvision's detector (box_score_thresh, rpn_post_nms_top_n_train, ...).

    Raises:
        ValueError: unknown backbone or options, a backbone without pyramid maps, or a checkpoint that does not fit.
    """

    factory: ClassVar[str]
    """torchvision's class."""
    losses: ClassVar[tuple[str, ...]]
    strides: ClassVar[tuple[int, ...]] = STRIDES
    background: ClassVar[int] = 1
    """1 if torchvision's class 0 is the background, and classes are counted from 1."""
    masks: ClassVar[bool] = False

    def __init__(
        self,
        classes: int,
        backbone: str = "pvt_v2_b0",
        memory: OneMemory | None = None,
        checkpoint: str | None = None,
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
        square = -(-max_size // STRIDES[-1]) * STRIDES[-1]
        if pad_to_square and max_size != square:
            raise ValueError(f"max_size={max_size} with pad_to_square must be a multiple of 32; take {square}")
        self.classes, self.min_size, self.max_size = classes, min_size, max_size
        body, stages, widths = make_body(backbone, self.strides, dict(backbone_options or {}))
        size = tuple(map(int, cache_image_size or ()))
        if size and (memory is None or len(size) != 2 or min(size) < 32):
            rule = "must be (height, width), each at least 32 pixels, for a memory"
            raise ValueError(f"cache_image_size={list(size)} {rule}; model.memory={memory!r}")
        if memory is not None:
            add_memory(body, memory, **({"input_size": size} if size else {}))
        if checkpoint is not None:
            load_backbone(body, Path(checkpoint).expanduser())
        # Unused parameters stop DDP: the head, and a norm after the last stage.
        body.prune_intermediate_layers(stages, prune_norm=True, prune_head=True)
        detection = require("torchvision.models.detection", extra="detection")
        kind, options = getattr(detection, self.factory), dict(detector_options or {})
        known = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}
        for key in options:  # torchvision passes over unknown ones
            if key not in known:
                raise ValueError(unknown_name("option in model.detector_options", key, sorted(known)))
        pyramid = Pyramid(body, stages, widths, fpn_channels, self._extra_levels(widths[-1], fpn_channels))
        sizes: dict[str, Any] = {"min_size": min_size, "max_size": max_size}
        if pad_to_square:
            sizes["size_divisible"] = max_size  # torchvision rounds both sides of a batch up to a multiple of it
        if anchor_sizes is not None:
            sizes |= self._anchors(anchor_sizes)
        with refused_by("torchvision", f"model.detector_options={shown(options)}"):
            self.detector = kind(pyramid, classes + self.background, **sizes, **options)

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return losses of a batch in training, detections in evaluation.

        Args:
            images: each float (3, H, W) in 0..1, of any size.
            targets: in training, one mapping per image: boxes (N, 4) as corners x1, y1, x2, y2 in pixels, labels long
                (N,) in 0..classes-1 and, for masks, masks uint8 (N, H, W).

        Returns:
            In training {name of a loss: scalar}, for the names in `losses`, to be summed. In evaluation one mapping per
            image, best first: boxes (N, 4), scores (N,), labels (N,), and masks (N, 1, H, W) as probabilities.

        Raises:
            ValueError: targets are missing in training.
        """
        if not self.training:
            found: list[dict[str, Tensor]] = self.detector(list(images))
            return [{**one, "labels": one["labels"] - self.background} for one in found]
        if targets is None:
            raise ValueError("targets=None in training: pass them, or call eval() for detections")
        shifted = [{**target, "labels": target["labels"] + self.background} for target in targets]
        losses: dict[str, Tensor] = self.detector(list(images), shifted)
        return losses

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Switch timm's gradient checkpointing of the backbone."""
        self.detector.backbone.body.set_grad_checkpointing(enabled)  # type: ignore[operator, union-attr]

    def _extra_levels(self, width: int, channels: int) -> Any:
        return require("torchvision.ops.feature_pyramid_network", extra="detection").LastLevelMaxPool()

    def _anchors(self, sizes: Sequence[int]) -> dict[str, Any]:
        return {"rpn_anchor_generator": anchor_generator([(int(size),) for size in sizes])}


@MODELS.register("faster_rcnn", paper="arXiv:1506.01497")
class FasterRCNN(Detector):
    """Faster R-CNN of torchvision on a (cached) pyramid backbone with FPN: boxes. Arguments: see `Detector`."""

    factory = "FasterRCNN"
    losses = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg")


@MODELS.register("mask_rcnn", paper="arXiv:1703.06870")
class MaskRCNN(Detector):
    """Mask R-CNN of torchvision on a (cached) pyramid backbone with FPN: boxes, masks. Arguments: see `Detector`."""

    factory = "MaskRCNN"
    losses = (*FasterRCNN.losses, "loss_mask")
    masks = True


@MODELS.register("retinanet", paper="arXiv:1708.02002")
class RetinaNet(Detector):
    """RetinaNet of torchvision on a (cached) pyramid backbone with FPN: boxes. Arguments: see `Detector`.

    Levels P3 to P5 come from the maps at strides 8, 16 and 32, P6 and P7 from the last map by strided convolutions.
    """

    factory = "RetinaNet"
    losses = ("classification", "bbox_regression")
    strides = STRIDES[1:]
    background = 0

    def _extra_levels(self, width: int, channels: int) -> Any:
        pyramid = require("torchvision.ops.feature_pyramid_network", extra="detection")
        return pyramid.LastLevelP6P7(width, channels)

    def _anchors(self, sizes: Sequence[int]) -> dict[str, Any]:
        octaves = [tuple(int(size * 2 ** (k / 3)) for k in range(3)) for size in sizes]  # three sizes per octave
        return {"anchor_generator": anchor_generator(octaves)}


def anchor_generator(sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return torchvision's anchors of three aspect ratios, with some sizes per level."""
    anchors = require("torchvision.models.detection.anchor_utils", extra="detection")
    return anchors.AnchorGenerator(tuple(sizes), ((0.5, 1.0, 2.0),) * len(sizes))


def make_body(name: str, strides: Sequence[int], options: dict[str, Any]) -> tuple[Any, list[int], list[int]]:
    """Return a timm model without its head, and indices and channels of its maps at `strides`.

    Raises:
        ValueError: timm does not know it, or it has no such maps.
    """
    timm = require("timm", extra="vision")
    from cached_transformers.integrations.timm import timm_models  # noqa: F401  (registers our models in timm)

    if not timm.is_model(name):
        raise ValueError(f"model.backbone={name!r}: unknown to timm; timm.list_models('pvt*') lists some")
    with refused_by("timm", f"{name} with model.backbone_options={shown(options)}"):
        body = timm.create_model(name, pretrained=False, num_classes=0, **options)
        if getattr(body, "class_token", False) is True:  # PVT; maps need none, and the original drops it, too
            body = timm.create_model(name, pretrained=False, num_classes=0, **{"class_token": False, **options})
    facts = list(getattr(body, "feature_info", None) or [])
    by_stride = {int(fact["reduction"]): (index, int(fact["num_chs"])) for index, fact in enumerate(facts)}
    if len(by_stride) < len(facts) or not set(strides) <= set(by_stride) or not hasattr(body, "forward_intermediates"):
        found = ", ".join(str(fact["reduction"]) for fact in facts) or "none"
        raise ValueError(
            f"model.backbone={name!r} has maps at strides {found}: a detector needs one at each of {list(strides)}, as "
            "in pvt_v2_b0, swin_tiny_patch4_window7_224 or resnet50"
        )
    return body, [by_stride[s][0] for s in strides], [by_stride[s][1] for s in strides]


def load_backbone(body: Any, source: Path) -> None:
    """Load the weights of a classifier into a timm model without head, in place; its shared caches stay empty.

    Raises:
        ValueError: there are no weights, or names or shapes differ, apart from head and caches; the message lists them.
    """
    heads = head_names(body)
    weights = read_weights(source, "model.checkpoint")
    for prefix in ("module.", "model."):  # of DDP, and of this library
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    stored = {k: v for k, v in weights.items() if not k.startswith(heads)}
    if isinstance(body, PyramidVisionTransformer):  # without class token, whose position is dropped, too
        stored = published_weights(stored, body)
    own = {k: v for k, v in body.state_dict().items() if k.endswith(".cache_MC")}
    stored = {k: v for k, v in stored.items() if not k.endswith(".cache_MC")} | own
    try:
        body.load_state_dict(stored)
    except RuntimeError as error:
        listed = str(error)
        advice = "; give both the same model.memory (null for none)" if ".memory." in listed else ""
        raise ValueError(f"{source} does not fit backbone {type(body).__name__}{advice}: {listed[:1500]}") from None
