"""What the data of several tasks share.

- dataset, splits: what a data set is; training, validation and test
- store, archives: arrays kept on disk; the files of folders, zips and tars by name
- image_files: image files to pictures
- text_files, text: texts on disk; a corpus as token ids
- tokenizers, subwords: bytes, words, byte pairs and special ids of a text; subwords of pairs of texts
- pairs, huggingface: a source and a target; data sets of the Hugging Face hub
- shard_order: items of shards in an order that goes on from its middle, for what does not fit a disk
"""

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
