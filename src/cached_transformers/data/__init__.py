"""What the data of several tasks share: batches and splits, files and archives on disk, images, texts as tokens."""

from __future__ import annotations

from .dataset import Batch, Dataset, LabelledDataset, majority_accuracy
from .image_files import BadFile
from .splits import SPLITS, stratified_split
from .store import cache_folder
from .text import TextDataset

__all__ = [
    "SPLITS",
    "BadFile",
    "Batch",
    "Dataset",
    "LabelledDataset",
    "TextDataset",
    "cache_folder",
    "majority_accuracy",
    "stratified_split",
]
