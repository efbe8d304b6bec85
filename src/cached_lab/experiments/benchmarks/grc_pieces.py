"""The pieces of which GRC's work in an image model is made, each to be measured alone; see `grc_roofline.py`.

* matrix products that the plain model has not, each as one product, in training with the two of its backward;
* attention over the cache by torch's own kernel, and beside it the products and exponentials that no kernel can do
  without, in blocks that a cache of the processor holds;
* the functions of the gates (two sigmoids and a GELU for each slot and channel) in blocks that a cache of the processor
  holds;
* the bytes that elementwise operations read or write at least once, by a copy of as many;
* AdamW on the parameters that are added.

Legend: B rows, N tokens, M slots, K keys, C cache width, H heads, F = C / H, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory

Call = Callable[[], object]

BLOCK, QUERIES = 1 << 16, 256
"""Numbers of a buffer that stays in a processor's cache, and queries whose logits do."""
KERNEL = "attention"
WITHIN = ("of which products", "of which exponentials")
"""What attention is made of, which is not added to it."""


class Shape(NamedTuple):
    """What one memory reads and writes at a call; `reduced` is the ratio of the spatial reduction of its keys."""

    rows: int
    tokens: int
    slots: int
    keys: int
    cache: int
    heads: int
    width: int
    reduced: int


def pieces(shapes: Mapping[Shape, int], device: str, *, training: bool) -> dict[str, Call]:
    """What is measured, by name, for all layers; without what inference has not."""
    made: dict[str, list[tuple[Call, int]]] = {}
    for s, count in shapes.items():
        of_tokens, of_slots = s.rows * s.tokens, s.rows * s.slots
        work = {"queries": _product(of_tokens, s.cache, s.cache, device, training)}
        if training:
            # Half of the gates' maps are of the cache alone, once a batch, but for the candidate's.
            work["gates"] = _all(
                _product(of_slots, s.cache, 3 * s.cache, device, training),
                _product(of_slots, s.cache, s.cache, device, training),
                _product(s.slots, s.cache, 2 * s.cache, device, training),
            )
            work["keys and values"] = _all(
                _product(s.keys, s.cache, 2 * s.cache, device, training),
                *([_product(s.keys, s.reduced**2 * s.cache, s.cache, device, training)] if s.reduced > 1 else []),
            )
        work[KERNEL] = _attention(s, device, training)
        work[WITHIN[0]] = _attention_products(s, device, training)
        work[WITHIN[1]] = _in_blocks(torch.exp, s.heads * of_tokens * s.keys * (2 if training else 1), device)
        if training:
            work["functions of the gates"] = _gate_functions(of_slots * s.cache, device)
        work["bytes"] = _copy(moved_bytes({s: 1}, training=training), device)
        for piece, call in work.items():
            made.setdefault(piece, []).append((call, count))
    return {piece: _repeated(calls) for piece, calls in made.items()}


def moved_bytes(shapes: Mapping[Shape, int], *, training: bool) -> int:
    """Bytes of float32 that elementwise operations read or write at least, products and attention aside.

    The mix reads y and o and writes what is projected. Its backward reads the gradient of that, y and o, and writes
    those of y and o. Gates write u, r and z, which their backward reads; the gradient of the first C channels of the
    tokens is added to that of the tokens.
    """
    total = 0
    for s, count in shapes.items():
        full, part, slots = (s.rows * n for n in (s.tokens * s.width, s.tokens * s.cache, s.slots * s.cache))
        mix = 2 * full + part
        numbers = mix + (3 * full + 2 * part) + 6 * slots + 3 * part if training else mix
        total += count * 4 * numbers
    return total


def _product(rows: int, inner: int, outer: int, device: str, training: bool) -> Call:
    """x W^T, and in training the gradients of both."""
    x, w, y = (torch.randn(*size, device=device) for size in ((rows, inner), (outer, inner), (rows, outer)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def call() -> None:
        torch.mm(x, w.T, out=y)
        if training:
            torch.mm(y, w, out=dx)
            torch.mm(y.T, x, out=dw)

    return call


def _attention(s: Shape, device: str, training: bool) -> Call:
    """By the same kernel and at the same shapes as `MemoryBranch`: on a CPU all rows are queries of one."""
    one_row, width = device == "cpu", s.cache // s.heads
    rows, queries = (1, s.rows * s.tokens) if one_row else (s.rows, s.tokens)
    q, g = (torch.randn(rows, queries, s.heads, width, device=device).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, s.keys, s.heads, width, device=device).transpose(1, 2) for _ in range(2))
    for t in (q, k, v):
        t.requires_grad_(training)

    def call() -> None:
        out = F.scaled_dot_product_attention(q, k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))
        if training:
            torch.autograd.grad(out, (q, k, v), g)

    return call


def _attention_products(s: Shape, device: str, training: bool) -> Call:
    """q k^T and the weights' product with v, head by head and few queries at a time; in training five more."""
    width, queries = s.cache // s.heads, s.rows * s.tokens * s.heads
    together = min(QUERIES, queries)
    q, o = (torch.randn(together, width, device=device) for _ in range(2))
    k, v = (torch.randn(s.keys, width, device=device) for _ in range(2))
    logits, dk = torch.empty(together, s.keys, device=device), torch.empty_like(k)

    def call() -> None:
        for _ in range(-(-queries // together)):
            torch.mm(q, k.T, out=logits)
            torch.mm(logits, v, out=o)
            if training:  # logits again, then the gradients of v, weights, q and k
                torch.mm(q, k.T, out=logits)
                torch.mm(logits.T, o, out=dk)
                torch.mm(o, v.T, out=logits)
                torch.mm(logits, k, out=o)
                torch.mm(logits.T, q, out=dk)

    return call


def _in_blocks(function: Callable[..., Tensor], numbers: int, device: str) -> Call:
    """A function of so many numbers, a block of them again and again."""
    block = torch.randn(min(BLOCK, numbers), device=device)
    out, times = torch.empty_like(block), -(-numbers // BLOCK)

    def call() -> None:
        for _ in range(times):
            function(block, out=out)

    return call


def _gate_functions(numbers: int, device: str) -> Call:
    """Two sigmoids and a GELU forward, and the GELU's gradient."""
    gelu, gradient = torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input

    def backward(t: Tensor, out: Tensor) -> Tensor:
        return gradient(t, t, grad_input=out)  # type: ignore[no-any-return]

    functions: tuple[Callable[..., Tensor], ...] = (torch.sigmoid, torch.sigmoid, gelu, backward)
    return _all(*(_in_blocks(function, numbers, device) for function in functions))


def _copy(size: int, device: str) -> Call:
    """Half of the bytes are read, half are written."""
    source = torch.zeros(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def optimizer_step(model: nn.Module) -> Call:
    """A step on the memories' parameters alone."""
    memories = [memory for memory in model.modules() if isinstance(memory, SharedCacheMemory)]
    added = [nn.Parameter(p.detach().clone()) for memory in memories for p in memory.parameters()]
    for p in added:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(added, lr=1e-4)
    return lambda: optimizer.step()


def _all(*calls: Call) -> Call:
    return _repeated([(call, 1) for call in calls])


def _repeated(calls: list[tuple[Call, int]]) -> Call:
    def call() -> None:
        for one, count in calls:
            for _ in range(count):
                one()

    return call
