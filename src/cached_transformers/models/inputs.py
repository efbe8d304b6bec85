"""Checks of model inputs: shapes and dtypes, and values through `checks.insist`, without synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.annotations import shown
from cached_transformers.checks import insist
from cached_transformers.layers.token_loss import IGNORED


def shape_of(name: str, tensor: object) -> tuple[int, ...]:
    """Return the shape of a tensor (ValueError: it is none)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}={shown(tensor)} must be a tensor, not {type(tensor).__name__}")
    return tuple(tensor.shape)


def check_tokens(
    name: str, tokens_BN: Tensor, vocabulary: int, longest: int | None = None, what: str = "a token id"
) -> None:
    """Check token ids of a vocabulary.

    Args:
        name: of the argument, for messages. longest: maximum of tokens per row. what: name of one token, for messages.

    Raises:
        ValueError: another shape or dtype, no row or no token, too many tokens, or a token outside the vocabulary (on
            the CPU, outside compiled code; otherwise a later device assertion).
    """
    shape, dtype = shape_of(name, tokens_BN), tokens_BN.dtype
    if len(shape) != 2 or 0 in shape or dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} of shape {shape} and dtype {dtype} must be token ids with at least one token, int64 or int32"
        )
    if longest is not None and shape[1] > longest:
        raise ValueError(f"{name} of {shape[1]} tokens, but max_length={longest}; shorten it or build a longer model")
    last = vocabulary - 1
    insist(
        _known(tokens_BN, vocabulary),
        f"{what} is not in a vocabulary of {vocabulary} tokens, 0 to {last}; encode the text with that vocabulary",
    )


def check_targets(targets_BN: Tensor, like_BN: Tensor, vocabulary: int, name: str = "the inputs") -> None:
    """Check targets of a loss: tokens or `IGNORED`, of the shape of `like_BN`, called `name` (ValueError)."""
    shape, expected = shape_of("targets", targets_BN), tuple(like_BN.shape)
    if shape != expected or targets_BN.dtype != torch.int64:
        raise ValueError(
            f"targets of shape {shape} and {targets_BN.dtype} must have the shape of {name}, {expected}, and int64"
        )
    insist(
        _known(targets_BN.masked_fill(targets_BN == IGNORED, 0), vocabulary),
        f"a target is not in {IGNORED} (no part in the loss) or a vocabulary of {vocabulary} tokens; a target other "
        f"than {IGNORED} must be 0 to {vocabulary - 1}: encode the text with that vocabulary",
    )


def check_padding(padding_BN: Tensor, like_BN: Tensor) -> None:
    """Check a padding mask of the inputs (ValueError)."""
    shape, expected = shape_of("padding", padding_BN), tuple(like_BN.shape)
    if shape != expected or padding_BN.dtype != torch.bool:
        given = f"padding of shape {shape} must have the shape of the inputs, {expected}"
        raise ValueError(f"{given}, and bool, True = padding, not {padding_BN.dtype}")


def check_places(places_BN2: Tensor, like_BN: Tensor) -> None:
    """Check the numbers of the sentence and the paragraph of each input (ValueError)."""
    shape, expected = shape_of("places", places_BN2), (*like_BN.shape, 2)
    if shape != expected or places_BN2.dtype != torch.int64:
        raise ValueError(
            f"places of shape {shape} and dtype {places_BN2.dtype} must be two numbers per token, {expected}, int64"
        )


def check_images(images_BCHW: Tensor, channels: int, size: tuple[int, int] | None = None) -> None:
    """Check images: number of channels, size if given, floating-point dtype (ValueError)."""
    shape = shape_of("images", images_BCHW)
    if len(shape) != 4 or 0 in shape or shape[1:] != (channels, *(size or shape[2:])):
        wanted = f"{(channels, *size)}; resize them" if size else f"({channels}, height, width)"
        raise ValueError(f"images of shape {shape}: this model takes at least one, each {wanted}")
    if not images_BCHW.is_floating_point():
        raise ValueError(f"images of dtype {images_BCHW.dtype} must be floating; convert them: images.float() / 255")


def _known(tokens: Tensor, vocabulary: int) -> Tensor:
    return ((tokens >= 0) & (tokens < vocabulary)).all()
