"""The neural memory of Titans (Behrouz, Zhong and Mirrokni 2024, arXiv:2501.00663): small nets that learn as they read.

    S_t = eta_t S_(t-1) - theta_t grad l(M; k_t, v_t)         surprise, with momentum
    M_t = (1 - alpha_t) M_(t-1) + S_t                         forgetting
    y_t = M_t(q_t)                                            read after the token's own write

    l = |M(k) - v|^2 / 2;   M(x) = f(... f(x W_1) ...) W_L, each net with weights of its own, L layers

The gradient is taken at the weights with which a chunk of C tokens begins, in closed form: for each matrix it is
x_j e_j^T of the token's input x_j to it and the error e_j that comes back to it. So both recurrences are linear in what
a chunk began with, and no token needs a matrix of its own:

    M_i = b_i M_0 + f_i S_0 - sum_j G_ij x_j e_j^T,           S_i = m_i S_0 - sum_j n_ij x_j e_j^T
    A = products of 1 - alpha,  N = products of eta,          P_ij = p_(j+1) ... p_i, the inverse of 1 - subdiagonal(p)
    n_ij = N_ij theta_j,  G = A n,  m_i = N_i1 eta_1,  f = A m,  b_i = A_i1 (1 - alpha_1)
    q W_i = b_i q W_0 + f_i q S_0 - sum_j G_ij (q . x_j) e_j  of each matrix, one behind the other

Nothing divides by a gate, so that eta = 0, theta = 0 and alpha = 1 are what they say. A token that is not there
(padding, what fills up a chunk) has theta = alpha = 1 - eta = 0, and adds no S to M either: eta = 1 alone would let
momentum go on.

Legend: B rows, G nets, N tokens, Q chunks, C tokens of a chunk, K width of keys, V of values, (I, O) of a matrix, P
numbers of a net; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise, repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.memories.parts.recurrent import mix, wide

Activation = Literal["gelu", "silu"]
ACTIVATIONS = ("gelu", "silu")
Loss = Literal["l2", "huber"]
LOSSES = ("l2", "huber")


class Gates(NamedTuple):
    """Of each token and net, (B, G, N): theta, alpha, 1 - eta; and 1, or 0 for a token that is not there.

    All of them are 0 for a token that is not there.
    """

    theta_BGN: Tensor
    alpha_BGN: Tensor
    damping_BGN: Tensor
    there_BGN: Tensor


class Learned(NamedTuple):
    """What the nets of each row have learned: weights and momentum, all matrices of a net behind each other."""

    weights_BGP: Tensor
    momentum_BGP: Tensor


class Soup(NamedTuple):
    """Other nets, which each token mixes with the learned one, number by number, and reads: matrices (B, S, G, I, O) of
    each layer, and weights of the mix (B, G, N, S + 1), that of the learned net last."""

    matrices: list[Tensor]
    weights: Tensor

    def among(self, layer: int, x: Tensor, own: Tensor) -> Tensor:
        """What the mixed matrix gives for x, of which that of the learned net gives `own`."""
        return mix(x[:, None] @ self.matrices[layer], own, self.weights)


def chunks(t: Tensor, size: int) -> Tensor:
    """(B, G, Q, size, ...) of (B, G, N, ...), the last chunk filled up with zeros."""
    missing = -t.shape[2] % size
    if missing:
        t = torch.cat([t, t.new_zeros(*t.shape[:2], missing, *t.shape[3:])], 2)
    return t.unflatten(2, (-1, size))


class Scan(NamedTuple):
    """By how much the state before a chunk and its gradients are in the state behind each of its tokens (see above)."""

    b: Tensor
    f: Tensor
    G: Tensor
    m: Tensor
    n: Tensor


def products(p: Tensor) -> Tensor:
    """(..., C, C): p_(j+1) ... p_i at (i, j) of numbers (..., C); 1 on the diagonal, 0 above it."""
    one = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).expand(*p.shape, -1)
    return torch.linalg.solve_triangular(
        one - torch.diag_embed(p[..., 1:], offset=-1), one, upper=False, unitriangular=True
    )


def scan_of(gates: Gates) -> Scan:
    """Coefficients of chunks (..., C)."""
    theta, alpha, damping, there = gates
    kept, eta = 1 - alpha, 1 - damping
    A, N = products(kept), products(eta)
    m, n = N[..., 0] * eta[..., :1], N * theta[..., None, :]
    f, G = A @ (there * m)[..., None], A @ (there[..., None] * n)
    return Scan((A[..., 0] * kept[..., :1])[..., None], f, G, m[..., None], n)


def activate(z: Tensor, kind: Activation) -> Tensor:
    return F.gelu(z) if kind == "gelu" else F.silu(z)


def slope(z: Tensor, kind: Activation) -> Tensor:
    """Derivative of the activation, of operations that have one themselves."""
    if kind == "silu":
        s = z.sigmoid()
        return s * (1 + z * (1 - s))
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


class NeuralMemory(nn.Module):
    """G nets for each row, which learn to give values for keys.

    Args:
        nets: G. width: K = V. layers: L, matrices of a net. expansion: width of the layers between, over K.
        chunk: C, tokens whose gradients are taken at the same weights. The first chunk begins with the first token of a
            call, the last one may be short: a stream that is cut at multiples of C gives the results of the whole.
        activation: f, between the matrices.
        loss: "l2", or "huber" (Yaad, arXiv:2504.13173): the length of an error counts up to `bound`, so that one odd
            value moves the weights no farther than others.
        bound: of the error's length, as multiple of sqrt(V).
        limit: ours: no matrix begins a chunk with a root mean square above it, whatever gates and inputs are. Weights
            that hold K values under independent keys have that of the values.

    The weights before the first token are parameters: the last matrix of each net is 0, so that it gives 0.

    State: 2 P numbers a net, P = K V with one layer, 2 expansion K^2 with two. Cost of a token, in multiply-adds a net:
    5 P with one layer and 5.5 P with two, C times the sum of I + O of its matrices, and 2 C^2 + C for the scans, half
    of the square for the two triangular systems.
    """

    def __init__(
        self,
        nets: int,
        width: int,
        *,
        layers: int = 1,
        expansion: int = 4,
        chunk: int = 16,
        activation: Activation = "silu",
        loss: Loss = "l2",
        bound: float = 1.0,
        limit: float = 10.0,
    ) -> None:
        super().__init__()
        inner = [expansion * width] * (layers - 1)
        self.shapes = list(pairwise([width, *inner, width]))
        self.chunk, self.activation, self.loss, self.bound, self.limit = chunk, activation, loss, bound, limit
        first = [torch.randn(nets, i, o) / i**0.5 for i, o in self.shapes[:-1]]
        first.append(torch.zeros(nets, *self.shapes[-1]))
        self.initial_GP = nn.Parameter(torch.cat([t.flatten(1) for t in first], 1))

    @property
    def size(self) -> int:
        """P."""
        return self.initial_GP.shape[1]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """(B, ..., G, I, O) of each layer of the nets, of their numbers (B, ..., G, P)."""
        parts = flat.split([i * o for i, o in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def start(self, learned: Learned, empty_B: Tensor) -> Learned:
        """What a segment begins with: what rows have learned; the initial weights where that is nothing."""
        empty_B11 = empty_B[:, None, None]
        initial_GP = self.initial_GP.to(learned.weights_BGP.dtype)
        # where, not multiplication: nothing that stands in an empty state may reach a result, not even NaN
        return Learned(
            torch.where(empty_B11, initial_GP, learned.weights_BGP), torch.where(empty_B11, 0, learned.momentum_BGP)
        )

    def read(self, weights: Tensor, q: Tensor, soup: Soup | None = None) -> Tensor:
        """(B, ..., G, N, V): what nets of weights (B, ..., G, P) give for queries; nothing is learned."""
        for layer, matrix in enumerate(self.matrices(weights)):
            x = activate(q, self.activation) if layer else q
            q = x @ matrix
            if soup is not None:
                q = soup.among(layer, x, q)
        return q

    def surprise(self, weights: list[Tensor], k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs x (..., C, I) of each matrix and errors e (..., C, O) behind it: token j's gradient is x_j e_j^T."""
        inputs, sums = [k], []
        for matrix in weights[:-1]:
            sums.append(inputs[-1] @ matrix)
            inputs.append(activate(sums[-1], self.activation))
        error = inputs[-1] @ weights[-1] - v
        if self.loss == "huber":
            bound = self.bound * v.shape[-1] ** 0.5
            error = error * bound * error.square().sum(-1, keepdim=True).clamp(min=bound**2).rsqrt()
        errors = [error]
        for matrix, z in zip(reversed(weights[1:]), reversed(sums), strict=True):
            errors.insert(0, errors[0] @ matrix.mT * slope(z, self.activation))
        return inputs, errors

    def limited(self, t: Tensor) -> Tensor:
        """Matrices (..., I, O) with a root mean square of at most `limit`."""
        top = self.limit**2
        share = (t.square().mean((-2, -1), keepdim=True) / top).clamp(min=1).rsqrt()
        return t * share  # of 1 leaves all as it is

    def forward(
        self,
        learned: Learned,
        q_BGNK: Tensor | None,
        k_BGNK: Tensor,
        v_BGNV: Tensor,
        gates: Gates,
        soup: Soup | None = None,
    ) -> tuple[Tensor | None, Learned]:
        """y (B, G, N, V), token t read after its own write, and what is learned behind the last token.

        Args:
            learned: as `start` gives it, in float32 or wider, in which everything is computed.
            q_BGNK: what to read; None for nothing but to learn.
            soup: what is mixed into the nets that are read.
        """
        tokens = k_BGNK.shape[2]
        if tokens == 0:
            return q_BGNK, learned
        size = min(self.chunk, tokens)
        with torch.autocast(k_BGNK.device.type, enabled=False):
            scan = scan_of(Gates(*(chunks(wide(t), size) for t in gates)))
            k, v = (chunks(wide(t), size) for t in (k_BGNK, v_BGNV))
            ends = [t[..., -1:, :] for t in (scan.b, scan.f, scan.m)] + [t[..., -1, :, None] for t in (scan.G, scan.n)]
            # Unbound, not indexed: the gradient of an index is as long as the sequence.
            writes = zip(*(t.unbind(2) for t in (k, v, *ends)), strict=True)
            reads: Iterable[tuple[Tensor, ...]] = repeat(())
            if q_BGNK is not None:
                q = chunks(wide(q_BGNK), size)
                near = (q @ k.mT) * scan.G
                mixes = () if soup is None else (chunks(soup.weights, size),)
                reads = zip(*(t.unbind(2) for t in (q, near, scan.b, scan.f, scan.G, *mixes)), strict=True)
            weights, momentum = (self.matrices(wide(t)) for t in learned)
            outputs = []
            for (key, value, *end), asked in zip(writes, reads, strict=False):
                weights = [self.limited(t) for t in weights]
                inputs, errors = self.surprise(weights, key, value)
                steps = list(zip(weights, momentum, inputs, errors, strict=True))
                if asked:
                    soup_now = None if soup is None else Soup(soup.matrices, asked[5])
                    outputs.append(self._read_within(asked[:5], steps, soup_now))
                moved = [_behind(end, step) for step in steps]
                weights, momentum = ([pair[part] for pair in moved] for part in (0, 1))
            behind = Learned(*(torch.cat([t.flatten(-2) for t in parts], -1) for parts in (weights, momentum)))
            return (torch.stack(outputs, 2).flatten(2, 3)[:, :, :tokens] if outputs else None), behind

    def _read_within(self, asked: tuple[Tensor, ...], steps: list[Step], soup: Soup | None) -> Tensor:
        """What the nets give for queries (..., C, K) of a chunk, each with what its token and those before it wrote.

        Args:
            asked: queries; G_ij (q_i . k_j); b, f and G of the scan.
        """
        q, near, b, f, G = asked
        for layer, (W, S, given, error) in enumerate(steps):
            x = activate(q, self.activation) if layer else q
            if layer:
                near = (x @ given.mT) * G
            q = b * (x @ W) + f * (x @ S) - near @ error
            if soup is not None:
                q = soup.among(layer, x, q)
        return q


Step = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one matrix: weights and momentum before a chunk, inputs and errors of its tokens."""


def _behind(end: list[Tensor], step: Step) -> tuple[Tensor, Tensor]:
    """Weights and momentum behind a chunk, by the last rows b, f, m, G and n of its scan."""
    (b, f, m, G, n), (W, S, given, error) = end, step
    to_weights, to_momentum = (torch.cat([given * G, given * n], -1).mT @ error).chunk(2, -2)
    return b * W + f * S - to_weights, m * S - to_momentum
