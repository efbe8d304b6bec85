"""What a forward hands to modules inside it that its keywords do not reach.

Keywords are the better way: whoever runs a layer again has them. But many a model of transformers hands its blocks
named arguments alone, and many a block its attention. So what is on its way stands beside the receivers for as long as
the forward runs, and stands there again whenever activation checkpointing runs one of its blocks again, which may be in
the backward of a later segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

CHECKPOINT = "_gradient_checkpointing_func"
"""By which a module of transformers calls what is to be run again in backward."""


class Handed:
    """While it is entered, each receiver has `gift` as its attribute `handed`.

    Args:
        gift: what is handed down. receivers: who is to find it.
        model: its blocks, where transformers checkpoints their activations, run again with the same gift.
    """

    def __init__(self, gift: Any, receivers: Sequence[Any], model: nn.Module | None = None) -> None:
        self.gift, self.receivers = gift, receivers
        again = model is not None and model.training and len(receivers) > 0
        self.blocks = [m for m in model.modules() if CHECKPOINT in vars(m)] if model is not None and again else []

    def __enter__(self) -> None:
        self.before = [receiver.handed for receiver in self.receivers]
        self.plain = [vars(block)[CHECKPOINT] for block in self.blocks]
        for receiver in self.receivers:
            receiver.handed = self.gift
        for block, plain in zip(self.blocks, self.plain, strict=True):
            vars(block)[CHECKPOINT] = partial(_checkpointed, plain, self.gift, self.receivers)

    def __exit__(self, *raised: Any) -> None:
        for receiver, before in zip(self.receivers, self.before, strict=True):
            receiver.handed = before
        for block, plain in zip(self.blocks, self.plain, strict=True):
            vars(block)[CHECKPOINT] = plain


def _checkpointed(
    plain: Callable[..., Any], gift: Any, receivers: Sequence[Any], block: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return plain(partial(_run, gift, receivers, block), *args, **kwargs)


def _run(gift: Any, receivers: Sequence[Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Handed(gift, receivers):
        return block(*args, **kwargs)
