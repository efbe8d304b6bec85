"""Data shared by several tasks.

- dataset, splits, samples: the batch and the data set; training, validation and test; a hash of the data
- store, archives: arrays cached on disk; files of folders, zips and tars by name
- image_files: image files to pictures
- text_files, text: texts on disk; a corpus as token ids
- tokenizers, subwords: tokenizers of a text, and of pairs of texts
- pairs: source and target
"""

from __future__ import annotations

from .dataset import Batch, LabelledDataset
from .image_files import BadFile
from .splits import SPLITS, stratified_split
from .store import cache_folder
from .text import TextDataset

__all__ = ["SPLITS", "BadFile", "Batch", "LabelledDataset", "TextDataset", "cache_folder", "stratified_split"]
