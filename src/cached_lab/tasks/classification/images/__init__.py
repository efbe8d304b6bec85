"""Images with a label each: one base class (`dataset.py`), with a reader per layout of files.

- class_folders: image files in a folder per class; ImageNet-1k and Tiny-ImageNet, with lists of the validation labels
- image_shards: tar shards
- cifar, digits: images held in memory
- augmentation: random changes, by timm
"""
