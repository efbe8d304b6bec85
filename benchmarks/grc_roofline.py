"""Lower bound of GRC's cost in an image model: each piece of its work by itself, as a share of the plain model's time.

The pieces are measured at the shapes of the model's layers, from warm buffers:

* matrix products that the plain model lacks, in training with the two products of their backward;
* attention over the cache by torch's kernel, and its products and exponentials in blocks that fit a processor's cache;
* the functions of the gates (two sigmoids and a GELU per slot and channel), in such blocks;
* the bytes that elementwise operations read or write at least once, as a copy of as many bytes;
* AdamW on the added parameters.

Their sum is the floor with torch's attention kernel; with the kernel's products and exponentials instead it is the
floor for any kernel. Neither counts launches of operations, cold buffers, or traffic between pieces.

Legend: B rows, N tokens, M slots, K keys, C cache width, H heads, F = C / H, D model width.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import command, grc
from cached_lab.experiments.costs.flops import count_flops, flops_of
from cached_lab.experiments.costs.throughput import fold_caches, image_batch
from cached_lab.experiments.costs.timing import Ratio, compare, training_step
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory

Call = Callable[[], object]
BLOCK, QUERIES = 1 << 16, 256
"""Numbers in a buffer that stays in a processor's cache, and queries whose logits do."""
KERNEL = "attention"
WITHIN = ("attention: products", "attention: exponentials")
"""Parts of the attention kernel, not added to it."""
ABSENT = Ratio(0.0, 0.0, 0.0, 0.0, 0.0)


class LayerShape(NamedTuple):
    """Sizes that one memory reads and writes in a call; `reduced` is the spatial reduction ratio of its keys."""

    rows: int
    tokens: int
    slots: int
    keys: int
    cache: int
    heads: int
    width: int
    reduced: int


def measure_pieces(batch: int, rounds: int, device: str, side: int) -> command.Result:
    """Measure every model of `grc.MODELS` without and with GRC, and the pieces of GRC's work."""
    found: list[command.Measurement] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name, architecture in grc.MODELS.items():
            found += _measure_model(name, architecture, batch, rounds, device, side)
    return command.Result(found, as_markdown(found), {"batch": batch, "image_size": side})


def _measure_model(
    name: str, architecture: str, batch: int, rounds: int, device: str, side: int
) -> list[command.Measurement]:
    models = {case: model.to(device) for case, model in grc.build(architecture, side, ("plain", "GRC")).items()}
    images, labels = image_batch(batch, side, device)
    shapes = shapes_of(models["GRC"], images)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels)

    training = pieces(shapes, device, training=True) | {"AdamW": optimizer_step(models["GRC"])}
    inferring = pieces(shapes, device, training=False)
    # A training step takes three times the operations of its forward pass.
    train_flops = {case: 3 * count_flops(model, images, mode="train") for case, model in models.items()}
    steps = {case: training_step(model, partial(loss, model)) for case, model in models.items()}
    train = compare(steps | training, "plain", rounds)
    for model in models.values():
        fold_caches(model)
    flops = {case: count_flops(model, images) for case, model in models.items()}
    calls = {case: partial(torch.no_grad()(model), images) for case, model in models.items()}
    inference = compare(calls | inferring, "plain", 3 * rounds)
    train_flops |= {piece: flops_of(call) for piece, call in training.items()}
    flops |= {piece: flops_of(call) for piece, call in inferring.items()}
    moved = {"bytes": (moved_bytes(shapes, training=True), moved_bytes(shapes, training=False))}
    return [
        {
            "model": name,
            "piece": piece,
            "train_gflops": train_flops[piece] / 1e9,
            "train_mib": moved.get(piece, (0, 0))[0] / 2**20,
            "train": train[piece],
            "inference_gflops": flops.get(piece, 0) / 1e9,
            "inference_mib": moved.get(piece, (0, 0))[1] / 2**20,
            "inference": inference.get(piece, ABSENT),
        }
        for piece in train
    ]


def shapes_of(model: nn.Module, images: Tensor) -> Counter[LayerShape]:
    """Count the shapes of the memories' work in one forward pass."""
    found: Counter[LayerShape] = Counter()
    handles = []
    for memory in model.modules():
        if isinstance(memory, SharedCacheMemory):

            def note(branch: nn.Module, args: tuple[Tensor, ...], cache: nn.Module = memory.cache) -> None:
                x_BNC, k_BHKF, _ = args
                (rows, tokens, width), (_, heads, keys, _) = x_BNC.shape, k_BHKF.shape
                slots = int(cache.length)  # type: ignore[arg-type]
                full = round(width / grc.RATIO)
                found[LayerShape(rows, tokens, slots, keys, width, heads, full, math.isqrt(slots // keys))] += 1

            handles.append(memory.branch.register_forward_pre_hook(note))
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return found


def pieces(shapes: Mapping[LayerShape, int], device: str, *, training: bool) -> dict[str, Call]:
    """Return the pieces by name, each for all layers; inference lacks those of the cache's update."""
    made: dict[str, list[Call]] = {}
    for s, count in shapes.items():
        of_tokens, of_slots = s.rows * s.tokens, s.rows * s.slots
        product = partial(_product, device=device, training=training)
        work = {"queries": [product(of_tokens, s.cache, s.cache)]}
        if training:
            # Half of the gates' projections depend on the cache only, so once per batch, except for the candidate's.
            work["gates"] = [
                product(of_slots, s.cache, 3 * s.cache),
                product(of_slots, s.cache, s.cache),
                product(s.slots, s.cache, 2 * s.cache),
            ]
            work["keys and values"] = [product(s.keys, s.cache, 2 * s.cache)]
            if s.reduced > 1:
                work["keys and values"].append(product(s.keys, s.reduced**2 * s.cache, s.cache))
        work[KERNEL] = [_attention(s, device, training)]
        work[WITHIN[0]] = [_attention_products(s, device, training)]
        work[WITHIN[1]] = [_in_blocks(torch.exp, s.heads * of_tokens * s.keys * (2 if training else 1), device)]
        if training:
            work["functions of the gates"] = _gate_functions(of_slots * s.cache, device)
        work["bytes"] = [_copy(moved_bytes({s: 1}, training=training), device)]
        for piece, calls in work.items():
            made.setdefault(piece, []).extend(calls * count)
    return {piece: partial(_run_all, calls) for piece, calls in made.items()}


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def moved_bytes(shapes: Mapping[LayerShape, int], *, training: bool) -> int:
    """Return the float32 bytes that elementwise operations read or write at least, without products and attention.

    The mix reads y and o and writes the projection's input. Its backward reads that input's gradient, y and o, and
    writes the gradients of y and o. Gates write u, r and z, which their backward reads; the gradient of the tokens'
    first C channels is added to that of the tokens.
    """
    total = 0
    for s, count in shapes.items():
        full, part, slots = (s.rows * n for n in (s.tokens * s.width, s.tokens * s.cache, s.slots * s.cache))
        mix = 2 * full + part
        total += count * 4 * (mix + (3 * full + 2 * part) + 6 * slots + 3 * part if training else mix)
    return total


def _product(rows: int, inner: int, outer: int, *, device: str, training: bool) -> Call:
    """x W^T, and in training the gradients of both factors."""
    x, w, y = (torch.randn(*size, device=device) for size in ((rows, inner), (outer, inner), (rows, outer)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def call() -> None:
        torch.mm(x, w.T, out=y)
        if training:
            torch.mm(y, w, out=dx)
            torch.mm(y.T, x, out=dw)

    return call


def _attention(s: LayerShape, device: str, training: bool) -> Call:
    """The kernel and shapes of `MemoryBranch`: on a CPU the queries of all rows form one row."""
    rows, queries = (1, s.rows * s.tokens) if device == "cpu" else (s.rows, s.tokens)
    width = s.cache // s.heads
    q, g = (torch.randn(rows, queries, s.heads, width, device=device).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, s.keys, s.heads, width, device=device).transpose(1, 2) for _ in range(2))
    for t in (q, k, v):
        t.requires_grad_(training)

    def call() -> None:
        out = F.scaled_dot_product_attention(q, k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))
        if training:
            torch.autograd.grad(out, (q, k, v), g)

    return call


def _attention_products(s: LayerShape, device: str, training: bool) -> Call:
    """q k^T and weights times v, by head and block of queries; in training five more products."""
    width, queries = s.cache // s.heads, s.rows * s.tokens * s.heads
    together = min(QUERIES, queries)
    q, o = (torch.randn(together, width, device=device) for _ in range(2))
    k, v = (torch.randn(s.keys, width, device=device) for _ in range(2))
    logits, dk = torch.empty(together, s.keys, device=device), torch.empty_like(k)

    def call() -> None:
        for _ in range(-(-queries // together)):
            torch.mm(q, k.T, out=logits)
            torch.mm(logits, v, out=o)
            if training:  # the logits a second time, then the gradients of v, weights, q and k
                torch.mm(q, k.T, out=logits)
                torch.mm(logits.T, o, out=dk)
                torch.mm(o, v.T, out=logits)
                torch.mm(logits, k, out=o)
                torch.mm(logits.T, q, out=dk)

    return call


def _in_blocks(function: Callable[..., Tensor], numbers: int, device: str) -> Call:
    """Apply a function to `numbers` numbers, one block repeatedly."""
    block = torch.randn(min(BLOCK, numbers), device=device)
    out, times = torch.empty_like(block), -(-numbers // BLOCK)

    def call() -> None:
        for _ in range(times):
            function(block, out=out)

    return call


def _gate_functions(numbers: int, device: str) -> list[Call]:
    """Two sigmoids and a GELU forward, and the GELU's gradient."""

    def backward(t: Tensor, out: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward.grad_input(t, t, grad_input=out)  # type: ignore[no-any-return]

    functions = (torch.sigmoid, torch.sigmoid, torch.ops.aten.gelu.out, backward)
    return [_in_blocks(function, numbers, device) for function in functions]


def _copy(size: int, device: str) -> Call:
    """Copy half of the bytes, so that reads and writes together have that size."""
    source = torch.zeros(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def optimizer_step(model: nn.Module) -> Call:
    """Return an AdamW step on the memories' parameters."""
    memories = [memory for memory in model.modules() if isinstance(memory, SharedCacheMemory)]
    added = [nn.Parameter(p.detach().clone()) for memory in memories for p in memory.parameters()]
    for p in added:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(added, lr=1e-4)
    return lambda: optimizer.step()


def floor(rows: Sequence[command.Measurement], *, perfect: bool = False) -> tuple[float, float]:
    """Sum the plain model and all pieces, for a training step and for inference of one model.

    Args:
        perfect: count the products and exponentials of attention instead of torch's kernel.
    """
    left_out = ("GRC", KERNEL) if perfect else ("GRC", *WITHIN)
    added = [row for row in rows if row["piece"] not in left_out]
    return sum(row["train"].median for row in added), sum(row["inference"].median for row in added)


def as_markdown(rows: list[command.Measurement]) -> str:
    """Write the pieces, their sum with the plain model, and the measured whole as a Markdown table."""
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        own = {row["piece"]: row for row in of_model}
        plain, cached = own.pop("plain"), own.pop("GRC")
        cells.append(_cells(plain, *(f"1 ({plain[mode].seconds:.2f} s)" for mode in ("train", "inference"))))
        cells += [_cells(row, _percent(row["train"]), _percent(row["inference"])) for row in own.values()]
        for name, perfect in (("floor: plain and all of these", False), ("floor, attention as its parts", True)):
            train, inference = floor(of_model, perfect=perfect)
            cells.append([model, name, "", "", f"{train:.3f}x", "", "", f"{inference:.3f}x"])
        cells.append(_cells(cached, str(cached["train"]), str(cached["inference"])))
    head = ["model", "piece", *(f"{mode} {x}" for mode in ("train", "inference") for x in ("GFLOPs", "MiB", "time"))]
    return command.table(head, cells)


def _cells(row: command.Measurement, train: str, inference: str) -> list[str]:
    def shown(name: str) -> str:
        return f"{row[name]:.1f}" if row[name] else ""

    before = [row["model"], row["piece"], shown("train_gflops"), shown("train_mib"), train]
    return [*before, shown("inference_gflops"), shown("inference_mib"), inference]


def _percent(ratio: Ratio) -> str:
    if not ratio.seconds:
        return ""
    return f"{100 * ratio.median:.1f} % ({100 * ratio.low:.1f}-{100 * ratio.high:.1f})"
