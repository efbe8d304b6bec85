"""Memories and attentions in transformers' models."""
