"""Bridges to other libraries, none of which is imported before somebody asks for it.

Importing this package imports the adapters, which register the attention layers of other libraries by name alone.
"""

from __future__ import annotations

from . import torch_nn as torch_nn
from . import torchvision_swin as torchvision_swin
from .hosts import Host, HostAttention, Query, Site, Stream, register_adapter
from .timm import adapters as timm_adapters
from .timm import without_memory as timm_without_memory
from .transformers import decoders as decoders
from .transformers import encoders as encoders
from .transformers import fused_decoders as fused_decoders
from .transformers import image_encoders as image_encoders
from .transformers import without_memory as without_memory
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
    "fused_decoders",
    "image_encoders",
    "register_adapter",
    "timm_adapters",
    "timm_without_memory",
    "torch_nn",
    "torchvision_swin",
    "without_memory",
]
