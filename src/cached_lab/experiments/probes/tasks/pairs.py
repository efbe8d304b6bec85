"""A pair of key and value in each segment, and at the end the question for the value of one key.

`recall` is the associative retrieval of RMT (arXiv:2207.06881), `remember` and `rewrite` those of ARMT
(arXiv:2407.04841), whose keys and values are strings of symbols. At distance 0, if a segment has room, pairs and
question share it: the beginning of a curriculum, where attention learns to bind first.

Legend: B rows, L tokens of a segment, K different keys, S symbols of a string.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import NOISE, Episode, ProbeTask, asked_at_end, noise, nothing_asked

MOST_KEYS = 2**20
"""The last value of every key is kept for each row."""
ARMT: dict[str, Any] = {"paper": "arXiv:2407.04841", "title": "ARMT", "chance": "1 / symbols"}


@PROBES.register(
    "recall",
    asks="binding",
    paper="arXiv:2207.06881",
    title="RMT",
    chance="1 / values",
    sizes="6 keys, 6 values; the paper: 4 pairs, 26 keys, 10 values",
    solved_by="binding a value to its key before or while it is carried",
)
class AssociativeRecall(ProbeTask):
    """Each segment before the last holds a key and its value; the last asks for the value of one of the keys.

    Values are independent of keys, so a key tells nothing. A memory that misses only the first segment still knows the
    other pairs. Ids: keys, values, noise, question.

    Args:
        segment: L. keys: their number, which bounds the distance. values: their number.
    """

    bounded_by = "keys"

    def __init__(self, segment: int = 4, keys: int = 6, values: int = 6) -> None:
        self.segment, self.keys, self.values = segment, keys, values
        self.vocabulary, self.chance, self.longest = keys + values + NOISE + 1, 1 / values, keys
        self.together = min(keys, segment // 2 - 1)
        self.shortest = 0 if self.together > 1 else 1

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        pieces = noise(rows, distance + 1, self.segment, self.keys + self.values, generator)
        pairs = distance or self.together
        keys_BK = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, :pairs]
        values_BK = self.keys + torch.randint(0, self.values, (rows, pairs), generator=generator)
        asked_B1 = torch.randint(0, pairs, (rows, 1), generator=generator)
        for pair, inputs_BL in enumerate(pieces):
            if pair < distance:
                inputs_BL[:, 0], inputs_BL[:, 1] = keys_BK[:, pair], values_BK[:, pair]
                yield nothing_asked(inputs_BL)
        if not distance:
            inputs_BL[:, : 2 * pairs] = torch.stack([keys_BK, values_BK], 2).flatten(1)
        inputs_BL[:, -2] = self.vocabulary - 1
        inputs_BL[:, -1] = keys_BK.gather(1, asked_B1)[:, 0]
        yield asked_at_end(inputs_BL, values_BK.gather(1, asked_B1))


@PROBES.register(
    "remember",
    asks="binding",
    **ARMT,
    sizes="keys and values of 1 of 16 symbols; the paper: keys of 1 to 3, 1 to 200 pairs",
    solved_by="a store that reaches back; a state with room for the pairs: d pairs in a matrix of d keys",
)
class Remember(ProbeTask):
    """A pair of strings in each segment, all keys different; the end gives a key and asks for its value.

    A segment is key, separator, value, end, blanks; the last one is blanks, key, question, value without its last
    symbol. Ids: symbols, separator, question, end, blank.

    Args:
        key_size, value_size: symbols of a key and of a value. symbols: number of symbols.
        segment: L; None for the length of a pair, key_size + value_size + 2.

    Raises:
        ValueError: an empty string, too many keys to keep a value for each, a segment shorter than a pair.
    """

    different, bounded_by = True, "key_size"

    def __init__(self, key_size: int = 1, value_size: int = 1, symbols: int = 16, segment: int | None = None) -> None:
        pair = key_size + value_size + 2
        if min(key_size, value_size) < 1 or symbols < 2:
            raise ValueError(
                f"key_size={key_size}, value_size={value_size}, symbols={symbols}: a string has at least one symbol, "
                "of at least 2; raise them"
            )
        self.keys = symbols**key_size
        if self.keys > MOST_KEYS or symbols**value_size > 2**62:
            raise ValueError(
                f"symbols={symbols} make {self.keys:,} keys of key_size={key_size} and {symbols**value_size:,} values "
                f"of value_size={value_size}; {MOST_KEYS:,} keys and 2^62 values are the most, take shorter ones"
            )
        if segment is not None and segment < pair:
            raise ValueError(f"segment={segment} must hold a pair with its marks; take at least {pair}")
        self.segment = pair if segment is None else segment
        self.key_size, self.value_size, self.symbols = key_size, value_size, symbols
        self.longest = self.keys if self.different else None
        self.together = min(self.keys, (self.segment - key_size - value_size) // pair)
        self.shortest = 0 if self.together > 1 else 1
        self.vocabulary, self.chance = symbols + 4, 1 / symbols

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        separator, question, end, blank = range(self.symbols, self.symbols + 4)
        order_BK = torch.rand(rows, self.keys, generator=generator).argsort(1) if self.different else None
        last_BK = torch.full((rows, self.keys), -1)
        empty_BL = torch.full((rows, self.segment), blank)
        mark_B1 = torch.ones(rows, 1, dtype=torch.long)
        before = torch.empty(rows, 0, dtype=torch.long)
        for index in range(distance or self.together):
            if order_BK is None:
                key_B = torch.randint(0, self.keys, (rows,), generator=generator)
            else:
                key_B = order_BK[:, index]
            value_B = torch.randint(0, self.symbols**self.value_size, (rows,), generator=generator)
            last_BK.scatter_(1, key_B[:, None], value_B[:, None])
            key_BS, value_BS = self._string(key_B, self.key_size), self._string(value_B, self.value_size)
            pair = torch.cat([key_BS, separator * mark_B1, value_BS, end * mark_B1], 1)
            if distance:
                yield nothing_asked(torch.cat([pair, empty_BL[:, pair.shape[1] :]], 1))
            else:
                before = torch.cat([before, pair], 1)
        key_B = torch.rand(rows, self.keys, generator=generator).masked_fill(last_BK < 0, -1).argmax(1)
        value_B = last_BK.gather(1, key_B[:, None])[:, 0]
        key_BS, value_BS = self._string(key_B, self.key_size), self._string(value_B, self.value_size)
        ending = torch.cat([key_BS, question * mark_B1, value_BS[:, :-1]], 1)
        blanks_BN = empty_BL[:, before.shape[1] + ending.shape[1] :]
        yield asked_at_end(torch.cat([before, blanks_BN, ending], 1), value_BS)

    def _string(self, numbers_B: Tensor, size: int) -> Tensor:
        """Write numbers as strings of symbols, the least significant one first."""
        return numbers_B[:, None] // self.symbols ** torch.arange(size) % self.symbols


@PROBES.register(
    "rewrite",
    asks="overwriting",
    **ARMT,
    sizes="keys and values of 1 of 16 symbols; the paper: 1 to 50 pairs",
    solved_by="knowing the order of stored items, or overwriting an old value (a delta rule, no plain sum)",
)
class Rewrite(Remember):
    """A pair of strings in each segment, keys may repeat; the end gives a key and asks for its last value."""

    different = False
