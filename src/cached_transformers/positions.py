"""Position encodings with explicit positions, so that a memory's keys keep the positions of their tokens.

A scheme may act in three places, each with an identity default: `embed` adds to the embedded tokens, `rotate` and
`query` turn keys and queries, `bias` adds to the attention logits.

Legend: B rows, N queries, M keys, H heads, E head width, D model width, P position channels (1, or row and column).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .annotations import checked
from .linear_maps import input_dtype, matrix_of


class Positions(nn.Module):
    """No position information; base of all schemes."""

    def open(self, run: bool) -> Positions:
        """Return the scheme for incremental decoding; it may cache results between calls.

        Each call has the keys of the last call, in the same order, and new ones after them. No key is after the query.

        Args:
            run: all keys are at consecutive positions that end with the query's, in any order.
        """
        return self

    def embed(self, positions_BNP: Tensor) -> Tensor | None:
        """(B, N, D) to add to the tokens, or None."""
        return None

    def rotate(self, t_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        """Keys with their positions applied."""
        return t_BHNE

    def query(self, q_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        """Queries with their positions applied; by default the same as keys."""
        return self.rotate(q_BHNE, positions_BNP)

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor | None:
        """(B, H, N, M) to add to the logits, or None.

        Args:
            q_BHNE: the queries before `query`.
            causal_run: the keys' positions are consecutive and end with the queries', and logits of later keys are
                ignored.
        """
        return None

    def by_distance(self, q_BHNE: Tensor, count: int) -> Tensor | None:
        """`bias` for keys 0, 1, ... `count` - 1 positions before each query, (B or 1, H, N or 1, count), for cores that
        look it up; None for a scheme that is no function of queries and distances."""
        return None


class LearnedPositions(Positions):
    """A trained vector for each of `length` positions.

    `embed` expects positions below `length`; the models check the segment's length and refuse a longer one.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.trunc_normal_(self.weight, std=width**-0.5)  # as large as the tokens, so that narrow models see it too

    def embed(self, positions_BNP: Tensor) -> Tensor:
        return self.weight[positions_BNP[..., 0]]


class SinusoidalPositions(Positions):
    """Fixed interleaved sines and cosines (arXiv:1706.03762, section 3.5); defined for every position."""

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoidal positions need an even width, got width={width}")
        self.width, self.base = width, base

    def embed(self, positions_BNP: Tensor) -> Tensor:
        angle = angles(positions_BNP, self.width, self.base)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class RotaryPositions(Positions):
    """Rotation of pairs of channels by an angle proportional to the position (RoFormer, arXiv:2104.09864, eq. 34)."""

    def __init__(self, head_width: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {head_width}")
        self.head_width, self.base = head_width, base

    def open(self, run: bool) -> Positions:
        return _KeptRotation(self.head_width, self.base)

    def turn(self, positions_BNP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B, 1, N, E / 2): cosine and sine of each angle."""
        angle = angles(positions_BNP, self.head_width, self.base)[:, None]
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def rotate(self, t_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        return rotated(t_BHNE, *self.turn(positions_BNP, t_BHNE.dtype))


class _KeptRotation(RotaryPositions):
    """Rotary scheme that computes the rotation once per token, for all layers that share it."""

    def __init__(self, head_width: int, base: float) -> None:
        super().__init__(head_width, base)
        self._last: tuple[Tensor, Tensor] | None = None

    def rotate(self, t_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        if not _has_complex(t_BHNE):
            return super().rotate(t_BHNE, positions_BNP)
        if self._last is None or self._last[0] is not positions_BNP or self._last[1].dtype.to_real() != t_BHNE.dtype:
            self._last = positions_BNP, torch.complex(*self.turn(positions_BNP, t_BHNE.dtype))
        return _turned(t_BHNE, self._last[1])


def rotated(t: Tensor, cos: Tensor, sin: Tensor | None = None) -> Tensor:
    """Turn pairs of channels, (..., E), by angles (..., E / 2); of a complex number instead of cosine and sine."""
    if _has_complex(t):
        return _turned(t, cos if sin is None else torch.complex(cos, sin))
    if sin is None:
        cos, sin = cos.real, cos.imag
    even, odd = t[..., 0::2], t[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _has_complex(t_BHNE: Tensor) -> bool:
    """True if pairs of channels can be viewed as complex numbers. A compiler fuses real products better."""
    usual = t_BHNE.dtype in (torch.float32, torch.float64) and t_BHNE.device.type in ("cpu", "cuda")
    if not usual or torch.compiler.is_compiling():
        return False
    *outer, last = t_BHNE.stride()
    return last == 1 and not any(steps % 2 for steps in (t_BHNE.storage_offset(), *outer))


def _turned(t_BHNE: Tensor, turn_B1NF: Tensor) -> Tensor:
    """Multiply each pair of channels by a complex number: one kernel instead of seven, and so in the backward."""
    pairs_BHNF = torch.view_as_complex(t_BHNE.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BHNF * turn_B1NF).flatten(-2)


class ALiBiPositions(Positions):
    """Logits that fall linearly with distance, at a fixed rate per head (ALiBi, arXiv:2108.12409, section 3)."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.register_buffer("slopes", torch.tensor(first + between), persistent=False)

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        distance = (q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]).abs()
        return -self.slopes[:, None, None] * distance[:, None]

    def by_distance(self, q_BHNE: Tensor, count: int) -> Tensor:
        return -self.slopes[None, :, None, None] * torch.arange(count, device=q_BHNE.device)


class RelativePositionBias2D(Positions):
    """A trained logit per head and per (row, column) offset inside a window (Swin, arXiv:2103.14030, eq. 4).

    The table's row for the offset (dy, dx), query minus key, is (dy + height - 1) * (2 * width - 1) + dx + width - 1.
    """

    def __init__(self, window: tuple[int, int], heads: int) -> None:
        super().__init__()
        if len(window) != 2 or min(window) < 1:
            raise ValueError(f"window={list(window)} must be (height, width), each at least 1 token")
        self.window = window
        self.table = nn.Parameter(torch.empty((2 * window[0] - 1) * (2 * window[1] - 1), heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def bias(
        self, q_BHNE: Tensor | None, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        offset = q_positions_BNP[:, :, None] - k_positions_BMP[:, None, :]
        height, width = self.window
        row = (offset[..., 0] + height - 1) * (2 * width - 1) + offset[..., 1] + width - 1
        return self.table[row].permute(0, 3, 1, 2)


class RelativePositions(Positions):
    """Relative positions of Transformer-XL (arXiv:1901.02860, section 3.3; github.com/kimiyoung/transformer-xl).

    logit_ij = [(q_i + u) . k_j + (q_i + v) . (W_r R_d)] / sqrt(E),  d = position of i - position of j,
    R_d = [sin(d w_0), ..., sin(d w_last), cos(d w_0), ..., cos(d w_last)],  w_k = base^(-2 k / width).

    In a causal run the term of R is one product with a table of M + N distances, B H N (M + N) E multiply-adds. For
    other positions it uses the sines and cosines of both places, B H N M width multiply-adds, or a gather with `clamp`.
    Sines and cosines are computed in float64: in float32 they are wrong in the fourth decimal at some thousand tokens.

    Args:
        heads: H. head_width: E. width: channels of R; H E by default.
        clamp: largest distance; longer ones are clamped. None for no limit.
        biases: (u, v) of shape (H, E) to share between layers; None for own ones.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        width: int | None = None,
        clamp: int | None = None,
        biases: tuple[nn.Parameter, nn.Parameter] | None = None,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.width, self.base = heads, head_width, width or heads * head_width, base
        if self.width % 2:
            raise ValueError(f"relative positions need an even number of channels, got width={self.width}")
        if clamp is not None and clamp < 1:
            raise ValueError(f"clamp={clamp} must be a distance of at least 1, or None for no limit")
        self.clamp = clamp
        self.project = nn.Linear(self.width, heads * head_width, bias=False)
        u, v = biases if biases is not None else (nn.Parameter(0.02 * torch.randn(heads, head_width)) for _ in range(2))
        self.content_bias, self.position_bias = u, v

    def open(self, run: bool) -> Positions:
        return _KeptDistances(self) if run or self.clamp is not None else _KeptCodes(self)

    def query(self, q_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        return q_BHNE + self.content_bias[:, None]

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        q_BHNE = self._asking(q_BHNE)
        if causal_run:
            return self._shifted(q_BHNE, k_positions_BMP.shape[1])
        if self.clamp is not None:
            return self._gathered(q_BHNE, q_positions_BNP, k_positions_BMP)
        return self._split(q_BHNE, q_positions_BNP, k_positions_BMP)

    def by_distance(self, q_BHNE: Tensor, count: int) -> Tensor | None:
        return self._asking(q_BHNE) @ self._of_distances(torch.arange(count, device=q_BHNE.device)).mT

    def _asking(self, q_BHNE: Tensor) -> Tensor:
        return (q_BHNE + self.position_bias[:, None]) / math.sqrt(self.head_width)

    def angles(self, positions_BNP: Tensor) -> Tensor:
        """(B, N, width / 2): position times w_k."""
        return angles(positions_BNP, self.width, self.base, widest(positions_BNP.device))

    def table(self, distances_K: Tensor) -> Tensor:
        """(H, K, E): W_r R_d for each distance."""
        angle = self.angles(distances_K[None, :, None])[0]
        code_KW = torch.cat([angle.sin(), angle.cos()], -1).to(input_dtype(self.project))
        return self.project(code_KW).unflatten(-1, (self.heads, self.head_width)).transpose(0, 1)

    def _of_distances(self, distances_K: Tensor) -> Tensor:
        """(H, K, E): the table with distances beyond the clamp as it."""
        return self.table(distances_K if self.clamp is None else distances_K.clamp(max=self.clamp))

    def _shifted(self, q_BHNE: Tensor, keys: int) -> Tensor:
        rows, n = q_BHNE.shape[0], q_BHNE.shape[2]
        table_HKE = self._of_distances(torch.arange(keys - 1, -1, -1, device=q_BHNE.device))
        # Shift the rows without a copy: a column of zeros at the front makes each row one longer; viewed with the right
        # length, row i starts N - 1 - i columns later, at its distances. Values after the diagonal are not used.
        # Heads first: the table serves all rows in one product, without a copy for each.
        wide_HTK = q_BHNE.transpose(0, 1).flatten(1, 2) @ F.pad(table_HKE, (0, 0, 1, 0)).mT
        return wide_HTK.unflatten(1, (rows, -1)).flatten(-2)[..., n:].unflatten(-1, (n, keys)).transpose(0, 1)

    def _split(self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor) -> Tensor:
        # Counted from the first query, so that large positions lose no digits.
        here = q_positions_BNP[:, :1]
        code_BMW = self._codes(k_positions_BMP - here).to(q_BHNE.dtype)
        return self._with_codes(q_BHNE, q_positions_BNP - here, code_BMW)

    def _codes(self, positions_BMP: Tensor) -> Tensor:
        """(B, M, width): pairs of each angle's cosine and negative sine, of keys."""
        k_angle = self.angles(positions_BMP)
        return torch.stack([k_angle.cos(), -k_angle.sin()], -1).flatten(-2)

    def _with_codes(self, q_BHNE: Tensor, positions_BNP: Tensor, code_BMW: Tensor) -> Tensor:
        """Logits of the queries of `_asking` with keys of these codes."""
        weight_HEW = matrix_of(self.project)[0].unflatten(0, (self.heads, self.head_width))
        # With pairs of the cosine's and the sine's channel, sums of angles are rotations.
        pairs_HEW = weight_HEW.unflatten(-1, (2, -1)).flip(-2).mT.flatten(-2)
        q_angle = -self.angles(positions_BNP)[:, None]
        q_code = rotated(q_BHNE @ pairs_HEW, q_angle.cos().to(q_BHNE.dtype), q_angle.sin().to(q_BHNE.dtype))
        # All heads share the codes, which a batched product would copy for each head.
        return (q_code.flatten(1, 2) @ code_BMW.mT).unflatten(1, q_code.shape[1:3])

    def _gathered(self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor) -> Tensor:
        limit = self.clamp or 0
        distance_BNM = (q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]).clamp(-limit, limit)
        table_HKE = self.table(torch.arange(-limit, limit + 1, device=q_BHNE.device))
        shape = (*q_BHNE.shape[:2], *distance_BNM.shape[1:])
        return (q_BHNE @ table_HKE.mT).gather(-1, (distance_BNM + limit)[:, None].expand(shape))


class KeptScheme(Positions):
    """A scheme that caches results of another one, for incremental decoding."""

    def __init__(self, scheme: Positions) -> None:
        super().__init__()
        self._schemes = [scheme]  # in a list, so that it stays a submodule of its layer only

    @property
    def scheme(self) -> Any:
        """The other scheme."""
        return self._schemes[0]

    def query(self, q_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        return self.scheme.query(q_BHNE, positions_BNP)  # type: ignore[no-any-return]


class _KeptCodes(KeptScheme):
    """A relative scheme for keys at any positions, which caches their codes, counted from the first query."""

    def __init__(self, scheme: RelativePositions) -> None:
        super().__init__(scheme)
        self._first_B1P: Tensor | None = None
        self._code_BMW = scheme.content_bias.new_empty(1, 0, scheme.width)

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        if self._first_B1P is None:
            self._first_B1P = q_positions_BNP[:, :1]
        known = self._code_BMW.shape[1]
        new = self.scheme._codes(k_positions_BMP[:, known:] - self._first_B1P).to(q_BHNE.dtype)
        self._code_BMW = torch.cat([self._code_BMW.expand(len(new), -1, -1), new], 1) if known else new
        q_BHNE = self.scheme._asking(q_BHNE)
        return self.scheme._with_codes(q_BHNE, q_positions_BNP - self._first_B1P, self._code_BMW)  # type: ignore[no-any-return]


class _KeptDistances(KeptScheme):
    """A relative scheme for a run of keys that ends with the query, or with a clamp; it caches W_r R_d."""

    def __init__(self, scheme: RelativePositions) -> None:
        super().__init__(scheme)
        self._table_HEK = scheme.content_bias.new_empty(scheme.heads, scheme.head_width, 0)

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        scheme, keys = self.scheme, k_positions_BMP.shape[1]
        needed = max(keys, (scheme.clamp or 0) + 1)
        if self._table_HEK.shape[2] < needed:
            distances = torch.arange(2 * needed - 1, -1, -1, device=q_BHNE.device)
            # Divided here instead of dividing each query.
            self._table_HEK = scheme._of_distances(distances).mT / math.sqrt(scheme.head_width)
        q_BHNE, longest = q_BHNE + scheme.position_bias[:, None], self._table_HEK.shape[2]
        if causal_run and q_BHNE.shape[2] == 1:  # in order, the farthest first
            return q_BHNE @ self._table_HEK[..., longest - keys :]
        distance_BNM = q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]
        place_BNM = longest - 1 - distance_BNM.clamp(0, longest - 1)  # an empty slot may be anywhere
        logits_BHNK = q_BHNE @ self._table_HEK
        return logits_BHNK.gather(-1, place_BNM[:, None].expand(*logits_BHNK.shape[:3], -1))


class BucketedPositions(Positions):
    """A trained logit per head and bucket of distances: T5's relative position bias (arXiv:1910.10683, section 2.1).

    Short distances have one bucket each; longer ones share buckets whose bounds grow geometrically up to `reach`, and
    all beyond share the last. One scheme serves all layers of a stack. Original implementation:
    google-research/text-to-text-transfer-transformer and mesh_tensorflow (`_relative_position_bucket`).

    Args:
        heads: H. buckets: number of buckets. reach: start of the last bucket.
        causal: no key is later than the query, and all buckets are for the past; otherwise half of them are for later
            keys.

    Raises:
        ValueError: fewer than 4 buckets (2 if causal), an odd number of them without `causal`, or a reach that the
            buckets of single distances exceed.
    """

    def __init__(self, heads: int, *, buckets: int = 32, reach: int = 128, causal: bool = False) -> None:
        super().__init__()
        sides = 1 if causal else 2
        if buckets < 2 * sides or buckets % sides or reach <= buckets // sides // 2:
            raise ValueError(
                f"buckets={buckets} must be at least {2 * sides}" + ("" if causal else " and even") + ", and "
                f"reach={reach} above the {buckets // sides // 2} distances that have a bucket each"
            )
        self.buckets, self.reach, self.causal = buckets, reach, causal
        self.table = nn.Parameter(torch.empty(buckets, heads))
        nn.init.normal_(self.table, std=0.02)

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of each offset, position of the key minus that of the query."""
        buckets = self.buckets if self.causal else self.buckets // 2
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        single = buckets // 2
        # Always float32: the bounds of a bucket must not depend on the model's dtype.
        share = torch.log(distance.clamp(min=1).float() / single) / math.log(self.reach / single)
        far = (single + (share * (buckets - single)).long()).clamp(max=buckets - 1)
        index = torch.where(distance < single, distance, far)
        return index if self.causal else index + (offset > 0) * buckets

    def bias(
        self, q_BHNE: Tensor | None, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        """(B, H, N, M), or (1, H, N, M) if both positions are one expanded row."""
        if q_positions_BNP.stride(0) == 0 and k_positions_BMP.stride(0) == 0:
            q_positions_BNP, k_positions_BMP = q_positions_BNP[:1], k_positions_BMP[:1]
        offset_BNM = k_positions_BMP[:, None, :, 0] - q_positions_BNP[:, :, None, 0]
        return self.table[self.bucket(offset_BNM)].permute(0, 3, 1, 2)

    def by_distance(self, q_BHNE: Tensor, count: int) -> Tensor:
        return self.table[self.bucket(-torch.arange(count, device=q_BHNE.device))].mT[None, :, None]


def share_biases(schemes: Iterable[Positions]) -> None:
    """Give all relative schemes the biases u and v of the first, as the smaller published Transformer-XL models have.

    Raises:
        ValueError: none of them is relative.
    """
    relative = [scheme for scheme in schemes if isinstance(scheme, RelativePositions)]
    if not relative:
        raise ValueError(
            "shared_biases=True needs layers with relative positions; take positions='relative', or a memory that "
            "brings them"
        )
    for scheme in relative[1:]:
        scheme.content_bias, scheme.position_bias = relative[0].content_bias, relative[0].position_bias


def alike(first: Positions, second: Positions) -> bool:
    """True if two schemes have the same settings, and parameters of the same shapes."""

    def settings(scheme: Positions) -> dict[str, Any]:
        shapes = {name: p.shape for name, p in scheme.named_parameters()}
        return {k: v for k, v in vars(scheme).items() if not k.startswith("_") and k != "training"} | shapes

    return type(first) is type(second) and settings(first) == settings(second)


def angles(positions_BNP: Tensor, width: int, base: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, N, width / 2): position times base^(-2 i / width), always float32 or wider.

    Not a buffer, which `model.bfloat16()` would convert: bfloat16 has no odd number above 256.
    """
    exponent = torch.arange(0, width, 2, device=positions_BNP.device, dtype=dtype) / width
    return positions_BNP[..., :1].to(dtype) * base**-exponent


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def grid_positions(size: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """(1, height * width, 2): row and column of each cell, in raster order."""
    rows = torch.arange(size[0], device=device).repeat_interleave(size[1])
    columns = torch.arange(size[1], device=device).repeat(size[0])
    return torch.stack([rows, columns], -1)[None]


@checked
def make_positions(name: str, *, width: int, heads: int, length: int | None = None) -> Positions:
    """Build a scheme by name: "none", "learned", "sinusoidal", "rotary", "alibi" or "relative".

    Raises:
        ValueError: the name is unknown, or name="learned" without a `length`.
    """
    if name == "learned" and length is None:
        raise ValueError("learned positions need a length: the longest segment; or take 'sinusoidal' or 'rotary'")
    makers: dict[str, Callable[[], Positions]] = {
        "none": Positions,
        "learned": lambda: LearnedPositions(length or 0, width),
        "sinusoidal": lambda: SinusoidalPositions(width),
        "rotary": lambda: RotaryPositions(width // heads),
        "alibi": lambda: ALiBiPositions(heads),
        "relative": lambda: RelativePositions(heads, width // heads),
    }
    if name not in makers:
        raise ValueError(f"unknown positions {name!r} (known: {', '.join(makers)})")
    return makers[name]()
