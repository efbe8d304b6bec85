"""What is trained: a folder each for classification, documents, language, translation, pretraining and detection.

Importing this package registers every data set, and with the models of others and the detectors every model.
"""

from __future__ import annotations

from typing import Any

from cached_lab.data import Dataset
from cached_lab.registries import DATASETS

from .classification.images.cifar import CIFAR10, CIFAR100
from .classification.images.dataset import ImageDataset
from .classification.images.digits import Digits
from .classification.images.huggingface_images import HuggingFaceImages
from .classification.images.image_folder import ImageFolder
from .classification.images.image_shards import ImageShards
from .classification.images.image_stream import ImageStream
from .classification.images.imagenet import ImageNet
from .classification.images.tiny_imagenet import TinyImageNet
from .classification.listops.datasets import ListOps, ListOpsTSV
from .classification.listops.expressions import Expression, evaluate, generate_trees, root_operator_baselines
from .classification.listops.files import read_tsv, verify_tsv, write_tsv
from .detection.coco import CocoDetection, DetectionBatch
from .detection.detector import FasterRCNN, MaskRCNN, RetinaNet
from .documents.labelled import LabelledDocuments
from .documents.planted import PlantedDocuments
from .documents.reordered import ReorderedDocuments
from .language.datasets import Books, Enwik8, HuggingFace, PennTreebank, Text, WikiText2, WikiText103
from .language.hub_stream import HuggingFaceStream
from .language.streams import StreamBatch, Streams
from .pretraining.datasets import Denoising
from .translation.datasets import IWSLT14, Multi30k, ParallelText

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DATASETS",
    "IWSLT14",
    "Books",
    "CocoDetection",
    "Denoising",
    "DetectionBatch",
    "Digits",
    "Enwik8",
    "Expression",
    "FasterRCNN",
    "HuggingFace",
    "HuggingFaceImages",
    "HuggingFaceStream",
    "ImageDataset",
    "ImageFolder",
    "ImageNet",
    "ImageShards",
    "ImageStream",
    "LabelledDocuments",
    "ListOps",
    "ListOpsTSV",
    "MaskRCNN",
    "Multi30k",
    "ParallelText",
    "PennTreebank",
    "PlantedDocuments",
    "ReorderedDocuments",
    "RetinaNet",
    "StreamBatch",
    "Streams",
    "Text",
    "TinyImageNet",
    "WikiText2",
    "WikiText103",
    "create_dataset",
    "evaluate",
    "generate_trees",
    "read_tsv",
    "root_operator_baselines",
    "verify_tsv",
    "write_tsv",
]


def create_dataset(name: str, split: str, **kwargs: Any) -> Dataset:
    """The data set registered as `name`.

    Args:
        name: "listops", "digits", "wikitext2", ... (`DATASETS.names()` lists them), or one registered elsewhere.
        split: "train", "validation" or "test".
        **kwargs: options of the data set; its class documents them.

    Raises:
        ValueError: unknown name, split or option (with a suggestion), or an option out of range.
        FileNotFoundError: the files are not where `path` says.
    """
    return DATASETS.create(name, split=split, **kwargs)
