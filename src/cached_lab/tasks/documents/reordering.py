"""Segment reordering, a pretraining task of ERNIE-Doc (arXiv:2012.15688, section 3.4).

A document is cut into up to m pieces, the pieces are permuted, and the model tells the permutation when it has read
all: one class for each permutation of 1, 2, ..., m pieces, 1! + 2! + ... + m! classes.

Legend: B rows, N tokens, C classes.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from cached_transformers.models.sequence_classifier import LastTokenHead


def orders(pieces: int = 4) -> list[tuple[int, ...]]:
    """The permutation of each class: fewer pieces first, those of as many pieces in lexicographic order.

    Raises:
        ValueError: no piece at all.
    """
    if pieces < 1:
        raise ValueError(f"pieces={pieces} must be at least 1")
    return [order for count in range(1, pieces + 1) for order in permutations(range(count))]


def reorder(tokens_BN: Tensor, pieces: int = 4, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Cut each document at random places, permute the pieces, and say how.

    The number of pieces is drawn first, then where to cut, then the order, all uniformly. Every piece has a token.

    Args:
        tokens_BN: documents without padding. generator: on the CPU.

    Returns:
        The documents with their pieces in a new order, and the class of each (B,): `orders(pieces)[class][i]` is the
        place that the i-th of the new pieces had.

    Raises:
        ValueError: documents of fewer tokens than pieces.
    """
    known = {order: index for index, order in enumerate(orders(pieces))}
    length = tokens_BN.shape[1]
    if length < pieces:
        raise ValueError(f"documents of {length} tokens cannot be cut into pieces={pieces}; take fewer pieces")
    documents, classes = [], []
    for row in tokens_BN:
        count = int(torch.randint(1, pieces + 1, (), generator=generator))
        cuts = (torch.randperm(length - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
        order = tuple(torch.randperm(count, generator=generator).tolist())
        parts = row.tensor_split(cuts)
        documents.append(torch.cat([parts[i] for i in order]))
        classes.append(known[order])
    return torch.stack(documents), torch.tensor(classes, device=tokens_BN.device)


class ReorderingHead(LastTokenHead):
    """Logits of the classes from the last token of the last segment.

    Args:
        width: D. pieces: m, C = 1! + ... + m!.
    """

    def __init__(self, width: int, pieces: int = 4) -> None:
        super().__init__(width, len(orders(pieces)))
