"""What the data of several tasks share: rows and batches, files on disk, images decoded, texts as tokens."""

from __future__ import annotations

from .base import SPLITS, Batch, Dataset, LabelledDataset, majority_accuracy, stratified_split
from .decoding import BadFile
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
