"""Nets of each row that learn by gradient descent while they read, chunk by chunk: what Titans and TTT share.

All gradients of a chunk are taken at the weights W_0 with which it begins, in closed form: for each matrix, that of
token j is x_j e_j^T, of the token's input x_j to it and the error e_j that comes back to it. A rule of learning is then
given by coefficients of the chunk's tokens and of its initial weights; no token needs a matrix of its own:

    W_i = b_i W_0 + f_i S_0 - sum_j G_ij x_j e_j^T
    q W_i = b_i q W_0 + f_i q S_0 - sum_j G_ij (q . x_j) e_j  of each matrix, one after the other

S is whatever the rule sums beside the weights: momentum, or the steps of a chunk that is not over. `move` says what a
chunk leaves.

Legend: B rows, G nets, N tokens, Q chunks, C tokens of a chunk, K width of keys, V of values, (I, O) of a matrix, P
numbers of a net; `...` any leading dimensions.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.interfaces.memory import ProjectKV, Query, Reading, Trace
from cached_transformers.state import refuse_narrow

from .recurrent import Answer, Asked, Recurrent, beside, full_precision, mix

Activation = Literal["gelu", "silu", "gelu_tanh"]


class Learned(NamedTuple):
    """Learned weights W and sums S of each row's nets, all matrices of a net in sequence."""

    weights_BGP: Tensor
    sums_BGP: Tensor


class FastReading(NamedTuple):
    """b (..., C, 1; None for 1), f (..., C, 1) and G (..., C, C) of the weights that each token of a chunk reads."""

    b: Tensor | None
    f: Tensor
    G: Tensor


class FastState(NamedTuple):
    """`Learned`, and how many tokens a row has written; one of none has the initial weights."""

    weights_BGP: Tensor
    sums_BGP: Tensor
    tokens_B: Tensor


@dataclass(frozen=True)
class TokenMaps:
    """Maps of one token with weights prepared for a segment: the nets' projections in one, the gradient of the loss by
    the outputs (see `FastWeights.error`), and TTT's last step. No tuple: their tensors have no rows to select.
    """

    project: Callable[[Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor] | None = None


class OpenChunk(NamedTuple):
    """Matrices (B, G, I, O) within a segment that is read token by token: those with which the open chunk begins, and
    those that the last token has left; the number of tokens, and those (modulo the chunk) at which rows begin a chunk;
    and tensors (B, chunk, ...) of a rule, by that number.
    """

    begun: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    maps: TokenMaps
    token: int
    begins: tuple[int, ...]
    by_place: tuple[Tensor, ...] = ()

    def here(self, first: int) -> list[Tensor]:
        """Tensors (B, ...) of the next token, from the first of these on."""
        return [t[:, self.token % t.shape[1]] for t in self.by_place[first:]]


class Soup(NamedTuple):
    """Other nets, which each token mixes with the learned one, number by number, and reads: matrices (B, S, G, I, O) of
    each layer, and weights of the mix (B, G, N, S + 1), that of the learned net last."""

    matrices: list[Tensor]
    weights: Tensor

    def among(self, layer: int, x: Tensor, own: Tensor) -> Tensor:
        """Product of the mixed matrix with x, where the learned net's product is `own`."""
        return mix(x[:, None] @ self.matrices[layer], own, self.weights)

    def narrow(self, first: int, tokens: int) -> Soup:
        """The same for some of the tokens."""
        return Soup(self.matrices, self.weights.narrow(2, first, tokens))


def written(padding_BN: Tensor | None, x_BND: Tensor) -> Tensor:
    """(B,): tokens of each row that are none of padding."""
    if padding_BN is None:
        return torch.full(x_BND.shape[:1], x_BND.shape[1], dtype=torch.long, device=x_BND.device)
    return (~padding_BN).sum(1)


def activate(z: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(z)
    return F.gelu(z, approximate="tanh" if kind == "gelu_tanh" else "none")


def slope(z: Tensor, kind: Activation) -> Tensor:
    """Derivative of the activation, of operations that have one themselves."""
    if kind == "silu":
        s = z.sigmoid()
        return s * (1 + z * (1 - s))
    if kind == "gelu":
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    z = z.clamp(-10, 10)  # where it is 0 or 1 to the last bit; a cube beyond all numbers would make it NaN
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (z + cubic * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t.square()) * scale * (1 + 3 * cubic * z.square())


def normed(t: Tensor, by: float, least: float) -> Tensor:
    """t / sqrt(by |t|^2 + least) of vectors in the last dimension."""
    return t * (torch.linalg.vector_norm(t, dim=-1, keepdim=True).square() * by + least).rsqrt()


def newton_schulz(t: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    """Matrices (..., I, O) with the same singular vectors, and singular values near 1 for those that are not 0.

    Args:
        coefficients: a, b, c of each step X <- a X + b X X^T X + c (X X^T)^2 X.
    """
    wider = t.shape[-2] > t.shape[-1]
    x = t.mT if wider else t
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in coefficients:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if wider else x


Step = tuple[Any, ...]
"""Data of one matrix: W and S before a chunk or token, inputs and errors of its tokens."""


class FastWeights(nn.Module, abc.ABC):
    """G nets for each row, f(x) = a(... a(x W_1) ...) W_L, which learn to give values for keys.

    Args:
        shapes: (I, O) of each matrix, without its bias.
        initial_GP: weights before the first token, a parameter; of each matrix I rows, and one more with `biased`.
        activation: a, between the matrices. chunk: C.
        limit: no matrix begins a chunk with a root mean square above it; None for no limit.
        biased: a bias after each matrix, which is a row of it whose input is 1.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        initial_GP: Tensor,
        *,
        activation: Activation,
        chunk: int,
        limit: float | None,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.shapes = [(i + biased, o) for i, o in shapes]
        self.activation, self.chunk, self.limit, self.biased = activation, chunk, limit, biased
        self.initial_GP = nn.Parameter(initial_GP)

    @property
    def size(self) -> int:
        """P."""
        return self.initial_GP.shape[1]

    @abc.abstractmethod
    def error(self, given: Tensor, wanted: Tensor) -> Tensor:
        """Gradient of the loss by the nets' outputs, (..., C, V)."""

    @abc.abstractmethod
    def move(self, end: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
        """W and S of one matrix after a chunk, by `end` and inputs times minus `rates` (the rule's for `through`)."""

    @abc.abstractmethod
    def follow(self, rule: Sequence[Any], begun: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """W and S of one matrix after one token, by the rule's coefficients in `Asked.rest`, a number last."""

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """(B, ..., G, I, O) of each layer of the nets, of their numbers (B, ..., G, P)."""
        parts = flat.split([i * o for i, o in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def empty(self, batch_size: int, like: Tensor) -> Learned:
        """State of rows without writes: zeros, in float32 or wider."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        weights_BGP = like.new_zeros(batch_size, *self.initial_GP.shape, dtype=dtype)
        return Learned(weights_BGP, weights_BGP.clone())

    def start(self, learned: Learned, empty_B: Tensor) -> Learned:
        """Weights at the start of a segment: learned ones, or the initial weights of rows without writes."""
        empty_B11 = empty_B[:, None, None]
        initial_GP = self.initial_GP.to(learned.weights_BGP.dtype)
        # no product: no value of an empty state may reach a result, not even NaN
        return Learned(
            torch.where(empty_B11, initial_GP, learned.weights_BGP), learned.sums_BGP.masked_fill(empty_B11, 0)
        )

    def read(self, weights: Tensor | Sequence[Tensor], q: Tensor, soup: Soup | None = None) -> Tensor:
        """(B, ..., G, N, V): what nets of weights (B, ..., G, P), or matrices, give for queries; nothing is learned."""
        return self._outputs(self.matrices(weights) if isinstance(weights, Tensor) else weights, self._input(q), soup)

    def _outputs(self, matrices: Sequence[Tensor], x: Tensor, soup: Soup | None) -> Tensor:
        y = x
        for layer, matrix in enumerate(matrices):
            if layer:
                x = self._input(activate(y, self.activation))
            y = x @ matrix
            if soup is not None:
                y = soup.among(layer, x, y)
        return y

    def surprise(
        self, weights: Sequence[Tensor], x: Tensor, v: Tensor, error: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs x (..., C, I) of each matrix, and errors e (..., C, O) after it: token j's gradient is x_j e_j^T."""
        inputs, sums = [x], []
        for matrix in weights[:-1]:
            sums.append(inputs[-1] @ matrix)
            inputs.append(self._input(activate(sums[-1], self.activation)))
        errors = [(error or self.error)(inputs[-1] @ weights[-1], v)]
        for matrix, z in zip(reversed(weights[1:]), reversed(sums), strict=True):
            errors.insert(0, errors[0] @ matrix[..., : z.shape[-1], :].mT * slope(z, self.activation))
        return inputs, errors

    def limited(self, t: Tensor) -> Tensor:
        """Matrices (..., I, O) with a root mean square of at most `limit`."""
        if self.limit is None:
            return t
        top = self.limit**2 * math.prod(t.shape[-2:])
        share = (t.square().sum((-2, -1), keepdim=True) / top).clamp(min=1).rsqrt()
        return t * share  # of 1 leaves all as it is

    def through(
        self,
        learned: Learned,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        reading: FastReading | None,
        rates: Sequence[Tensor],
        end: Sequence[Tensor],
        soup: Soup | None = None,
    ) -> tuple[Tensor | None, Learned]:
        """Read and learn chunk by chunk: reads of the tokens, (B, G, Q, C, V), and the weights after the last one.

        Args:
            learned: as `start` gives it, in float32 or wider, in which everything is computed.
            q, k, v: (B, G, Q, C, K or V), in chunks. q is None for nothing but to learn.
            reading: coefficients (B, G, Q, ...) of the read, with q.
            rates, end: coefficients for `move`: (B, 1 or G, Q, C, 1) of inputs, and (B, 1 or G, Q, 1, 1). With a
                window, inputs are as many tokens more than queries.
            soup: snapshots mixed into the nets that are read; their weights in chunks (B, G, Q, C, S + 1).
        """
        nets = k.shape[:2]

        def by_chunk(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
            # Unbound, not indexed: the gradient of an index is as long as the sequence.
            return zip(*(t.expand(*nets, *t.shape[2:]).flatten(0, 1).unbind(1) for t in tensors), strict=True)

        # The first inputs are known, and their products computed for all chunks at once: the loop is many small steps.
        k, rates = self._input(k).contiguous(), [-rate for rate in rates]
        writes = zip(*(by_chunk(*t) for t in ((k, v), rates, [k * rate for rate in rates], end)), strict=True)
        reads: Iterable[tuple[Tensor, ...]] = repeat(())
        mixes = repeat(()) if soup is None else by_chunk(soup.weights)
        if q is not None and reading is not None:
            b, f, G = reading
            q, G = self._input(q).contiguous(), -G
            known = (q, q if b is None else b * q, f * q, (q @ k.mT) * G)
            reads = by_chunk(*known, f, G, *(() if b is None else (b,)))
        weights, sums = ([t.flatten(0, 1) for t in self.matrices(wide(part))] for part in learned)
        outputs = []
        for ((key, value), by, scaled, last), asked, mixed in zip(writes, reads, mixes, strict=False):
            weights = [self.limited(t) for t in weights]
            inputs, errors = self.surprise(weights, key, value)
            if asked:
                now = soup and Soup(soup.matrices, mixed[0].unflatten(0, nets))
                outputs.append(self._read_within(asked, zip(weights, sums, inputs, errors, strict=True), now))
            pushes = [scaled, *([x * rate for rate in by] for x in inputs[1:])]
            moved = [self.move(last, step) for step in zip(weights, sums, pushes, errors, strict=True)]
            weights, sums = ([pair[part] for pair in moved] for part in (0, 1))
        after = (torch.cat([t.flatten(-2) for t in parts], -1).unflatten(0, nets) for parts in (weights, sums))
        return (torch.stack(outputs, 1).unflatten(0, nets) if outputs else None), Learned(*after)

    def step(self, nets: OpenChunk, asked: Asked, soup: Soup | None) -> tuple[Tensor, OpenChunk]:
        """Read one token, (B, G, 1, V), after its own write; and the nets for the next one."""
        q, k, v, *rule = asked.rest  # q and k as `_input` gives them
        with full_precision(v):
            inputs, errors = self.surprise(nets.begun, k, v, nets.maps.error)
            steps = zip(nets.weights, nets.sums, inputs, errors, strict=True)
            pairs = [self.follow(rule, begun, step) for begun, step in zip(nets.begun, steps, strict=True)]
            weights, sums = zip(*pairs, strict=True)
            nets = OpenChunk(nets.begun, weights, sums, nets.maps, nets.token + 1, *nets[5:])
            out = self._outputs(weights, q, soup)
            return out, self.turn(nets) if nets.token % self.chunk in nets.begins else nets

    def turn(self, nets: OpenChunk) -> OpenChunk:
        """Begin a chunk."""
        begun = tuple(map(self.limited, nets.weights))
        return nets._replace(begun=begun, weights=begun)

    def _input(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0) if self.biased else x

    def _read_within(self, asked: tuple[Tensor, ...], steps: Iterable[Step], soup: Soup | None) -> Tensor:
        """Outputs for q, b q, f q, -G_ij (q_i . k_j), f, -G and b of a chunk, each after its token's write."""
        x, to_weights, to_sums, near, f, G, *b = asked  # of queries as `_input` gives them
        y = x
        for layer, (W, S, given, error) in enumerate(steps):
            if layer:
                x = self._input(activate(y, self.activation))
                to_weights, to_sums, near = b[0] * x if b else x, f * x, (x @ given.mT) * G
            y = torch.baddbmm(torch.baddbmm(to_weights.bmm(W), to_sums, S), near, error)
            if soup is not None:
                wide_x, wide_y = (t.unflatten(0, soup.weights.shape[:2]) for t in (x, y))
                y = soup.among(layer, wide_x, wide_y).flatten(0, 1)
        return y


class FastMemory(Recurrent):
    """A layer memory whose state is what nets of each row have learned."""

    @property
    @abc.abstractmethod
    def net(self) -> Any:
        """The nets, `FastWeights`."""

    def init_state(self, batch_size: int, like: Tensor) -> FastState:
        tokens_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return FastState(*self.net.empty(batch_size, like), tokens_B)  # type: ignore[call-arg]

    def open(self, state: FastState, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> FastState:
        return state

    @abc.abstractmethod
    def begin(self, state: FastState, learned: Learned, x_BND: Tensor) -> OpenChunk:
        """Nets for one token at a time: state before the segment, after its first tokens learned weights."""

    def read(self, opened: FastState | OpenChunk, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        return self.read_with(opened, query, project_kv)

    def read_with(self, opened: FastState | OpenChunk, query: Query, project_kv: ProjectKV | None) -> Reading:
        """`read`, for options to change."""
        return super().read(opened, query)

    def advance(self, opened: FastState | OpenChunk, x_BND: Tensor, traces: Sequence[Trace]) -> OpenChunk:
        query, reading = traces[0][2:4]
        if isinstance(opened, OpenChunk):
            return reading.carry  # type: ignore[no-any-return]
        return self.begin(opened, reading.carry, query.x_BND.narrow(1, *(query.segment or (0, x_BND.shape[1]))))

    def projected(self, opened: OpenChunk, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Query, key and value of one token, (B, 3, G, 1, K), and a further projection, in float32 or wider."""
        t_BND, width = wide(opened.maps.project(x_BND)), 3 * self.groups * self.key_width
        return t_BND[..., :width].view(len(x_BND), 3, self.groups, 1, -1), t_BND[..., width:]

    def soup(self, opened: FastState, query: Query, asked: Asked, snapshots_BS: Tensor, weights_BGNS: Tensor) -> Answer:
        mixed = Soup(self.net.matrices(snapshots_BS), weights_BGNS)
        return self.online(opened, query, asked, mixed)  # type: ignore[call-arg]

    def answer(self, snapshot: Tensor, asked: Asked) -> Tensor:
        return self.told(snapshot, beside(asked.q_BGNK, snapshot.dim() + 1))

    def told(self, weights: Tensor, q: Tensor, soup: Soup | None = None) -> Tensor:
        """Outputs of nets with these weights for queries."""
        with torch.autocast(q.device.type, enabled=False):
            return self.net.read(weights, q, soup)  # type: ignore[no-any-return]

    def learned(self, state: FastState) -> Learned:
        """Initial weights of the segment."""
        refuse_narrow(state, f"the small steps by which {type(self).__name__} learns")
        return self.net.start(Learned(*state[:2]), state.tokens_B == 0)  # type: ignore[no-any-return]

    def by_net(self, t_BND: Tensor) -> Tensor:
        """(B, G, N, D / G), in float32 or wider."""
        return wide(t_BND).unflatten(-1, (self.groups, -1)).transpose(1, 2)

    def after(self, state: FastState, learned: Sequence[Tensor], trace: Trace) -> FastState:
        """The state after a segment; rows without a write keep their weights to the last bit."""
        written_B = written(trace.query.padding_BN, trace.x_BND)
        new = [b.to(a.dtype) for a, b in zip(state[:2], learned[:2], strict=True)]
        if trace.query.padding_BN is not None or not trace.x_BND.shape[1]:
            kept_B11 = (written_B == 0)[:, None, None]
            new = [torch.where(kept_B11, a, b) for a, b in zip(state[:2], new, strict=True)]
        return FastState(new[0], new[1], state.tokens_B + written_B)
