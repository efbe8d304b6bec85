"""Memories and attentions in models of other libraries, which are imported only when they are needed.

Importing this package imports the adapters, which register the attention layers of other libraries only by name.
"""

from __future__ import annotations

from . import torch_nn as torch_nn
from . import torchvision_swin as torchvision_swin
from .hosts import Host, HostAttention, Query, Site, Stream, register_adapter
from .timm import adapters as timm_adapters
from .transformers import decoders as decoders
from .transformers import encoders as encoders
from .transformers.add_stateful_memory import add_stream_memory

__all__ = [
    "Host",
    "HostAttention",
    "Query",
    "Site",
    "Stream",
    "add_stream_memory",
    "decoders",
    "encoders",
    "register_adapter",
    "timm_adapters",
    "torch_nn",
    "torchvision_swin",
]
