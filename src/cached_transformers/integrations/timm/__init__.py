"""Memories and attentions in timm's models."""
