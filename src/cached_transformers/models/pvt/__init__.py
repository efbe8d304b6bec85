"""Pyramid Vision Transformer, first version (arXiv:2102.12122)."""

from .published_weights import published_weights
from .pyramid import PyramidVisionTransformer

__all__ = ["PyramidVisionTransformer", "published_weights"]
