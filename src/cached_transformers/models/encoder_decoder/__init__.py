"""Sequence to sequence: an encoder with a memory, and a decoder that attends what it made of the source."""

from .encoder_decoder import EncoderDecoder
from .text_decoder import Decoder, DecoderCache, Encoded

__all__ = ["Decoder", "DecoderCache", "Encoded", "EncoderDecoder"]
