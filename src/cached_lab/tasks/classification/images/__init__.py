"""Images with a label each: one base class (`dataset.py`), with a reader per layout of files.

- class_folders: image files in a folder per class ("image_folder")
- imagenet: ImageNet-1k and Tiny-ImageNet, with lists of the validation labels
- image_shards, image_stream: tar shards, indexed or read once from beginning to end
- huggingface_images: rows of the hub
- cifar, digits: images held in memory
- augmentation: random changes, by timm
"""
