"""Data sets by name: `create_dataset("listops", split="train")`; `DATASETS` lists them."""

from __future__ import annotations

from typing import Any

from ..registry import DATASETS
from .base import SPLITS, Batch, Dataset, LabelledDataset, majority_accuracy, stratified_split
from .cifar import CIFAR10, CIFAR100
from .coco import CocoDetection, DetectionBatch
from .decoding import BadFile
from .denoising_datasets import Denoising
from .digits import Digits
from .huggingface_images import HuggingFaceImages
from .image_folder import ImageFolder
from .image_shards import ImageShards
from .imagenet import ImageNet
from .images import ImageDataset
from .listops import Expression, evaluate, generate_trees, root_operator_baselines
from .listops_datasets import ListOps, ListOpsTSV
from .listops_files import read_tsv, verify_tsv, write_tsv
from .store import cache_folder
from .streams import StreamBatch, Streams
from .text import TextDataset
from .text_datasets import Books, Enwik8, HuggingFace, PennTreebank, Text, WikiText2, WikiText103
from .tiny_imagenet import TinyImageNet
from .translation import IWSLT14, Multi30k, Translation

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DATASETS",
    "IWSLT14",
    "SPLITS",
    "BadFile",
    "Batch",
    "Books",
    "CocoDetection",
    "Dataset",
    "Denoising",
    "DetectionBatch",
    "Digits",
    "Enwik8",
    "Expression",
    "HuggingFace",
    "HuggingFaceImages",
    "ImageDataset",
    "ImageFolder",
    "ImageNet",
    "ImageShards",
    "LabelledDataset",
    "ListOps",
    "ListOpsTSV",
    "Multi30k",
    "PennTreebank",
    "StreamBatch",
    "Streams",
    "Text",
    "TextDataset",
    "TinyImageNet",
    "Translation",
    "WikiText2",
    "WikiText103",
    "cache_folder",
    "create_dataset",
    "evaluate",
    "generate_trees",
    "majority_accuracy",
    "read_tsv",
    "root_operator_baselines",
    "stratified_split",
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
