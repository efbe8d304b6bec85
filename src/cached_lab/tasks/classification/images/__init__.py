"""Images with a label each: one data set (`dataset.py`), which a reader for every layout of files fills.

- class_folders, image_folder, imagenet, tiny_imagenet: image files in a folder for each class
- image_shards, huggingface_images: image files in tar shards; rows of the hub
- image_stream, tar_streams: tar shards that are read from beginning to end, and not kept
- cifar, digits: images held in memory
- augmentation: random changes, by timm
"""
