"""Streams of queries, keys and values that a memory with scored slots attends and writes.

Legend: B rows, H heads, G heads of keys, N tokens, M slots, L slots and tokens, T tokens of a stream, E head width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Query, Reading, Trace

Golden = dict[str, Tensor]


def golden(shared: Path, name: str) -> Golden:
    file = np.load(shared / f"golden/kv/{name}.npz", allow_pickle=False)
    return {key: torch.tensor(file[key]) for key in file.files}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def turned(t_BGME: Tensor, places_BGM: Tensor) -> Tensor:
    """Keys rotated in pairs (e, e + E / 2)."""
    half = t_BGME.shape[-1] // 2
    angle_BGMF = places_BGM[..., None] * 10000.0 ** (-torch.arange(half, dtype=torch.double) / half)
    cos, sin = angle_BGMF.cos(), angle_BGMF.sin()
    first, second = t_BGME.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Step(NamedTuple):
    """What a segment's queries read, (B, H, N, E), and the numbers of kept tokens, (B, G, M), -1 for empty slots."""

    out: Tensor
    kept: Tensor
    state: Any


def steps(memory: Any, data: Golden, segment: int, places: str = "cache", offset: int = 0) -> list[Step]:
    """The segments of a stream that begins at `offset`, attended and written; slots are at places in the cache or in
    the stream."""
    q, k, v = (data[name] for name in "qkv")
    (rows, groups, tokens, width), heads = k.shape, q.shape[1]
    memory.key_shape = (groups, width)
    state = memory.init_state(rows, k)
    slots = memory.init_state(1, k).valid_BM.shape[1]
    kept = torch.full((rows, groups, slots), -1)
    found = []
    for first in range(0, tokens, segment):
        here = slice(first, min(first + segment, tokens))
        n = here.stop - first
        new = torch.arange(first, here.stop)
        at = torch.cat(
            [
                torch.arange(first - slots, first).expand_as(kept) if places == "cache" else kept,
                new.expand(rows, groups, n),
            ],
            2,
        )
        known = torch.cat([kept, new.expand(rows, groups, n)], 2)
        index = known.clamp(min=0)[..., None].expand(-1, -1, -1, width)
        keys, values = (turned(k.gather(2, index), at), v.gather(2, index))
        keys, values, seen = (t.repeat_interleave(heads // groups, 1) for t in (keys, values, known >= 0))
        sees = seen[:, :, None] & torch.ones(n, slots + n, dtype=torch.bool).tril(slots)
        logits = turned(q[:, :, here], new.expand(rows, heads, n)) @ keys.mT / width**0.5
        weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)
        x, positions = torch.zeros(rows, n, heads * width), offset + new[None, :, None].expand(rows, -1, -1)
        own_k, own_v = (t[:, :, here].repeat_interleave(heads // groups, 1) for t in (k, v))
        query = Query(x, q[:, :, here], positions, None, None, own_k, own_v, lambda t, p: turned(t, p[:, None, :, 0]))
        observed = weights.masked_fill(~sees, torch.nan)[:, :, -(memory.observe or n) :]
        state, _ = memory.write(state, Trace(x, x, query, Reading(), observed))
        k_BGME = (
            state.k_BGME if hasattr(state, "k_BGME") else memory.open(state, positions[:, :1], lambda *_: None).k_BHME
        )
        same = (k_BGME[:, :, :, None] == k[:, :, None]).all(-1)
        kept = torch.where(state.valid_BM[:, None].expand_as(kept), same.long().argmax(-1), -1)
        found.append(Step(weights.nan_to_num(0) @ values, kept, state))
    return found
