"""Encoder-decoder with a memory in the encoder."""

from .encoder_decoder import EncoderDecoder
from .text_decoder import Decoder, DecoderCache, Encoded

__all__ = ["Decoder", "DecoderCache", "Encoded", "EncoderDecoder"]
