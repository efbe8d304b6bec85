"""The Feedback Transformer: a twin in loops, golden values, shared gradients, and the start of a stream.

Legend: B rows, N tokens, D model width, H heads, E head width, M slots, T tokens of a stream, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from memories.harness import agree, inputs, logit, sines, wild
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.context_attention import ContextAttention
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.memories.feedback import Feedback, LearnedDistances
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions
from cached_transformers.positions import RelativePositions

D, H, E, DEPTH, LENGTH = 8, 2, 4, 2, 3


def make(depth: int = DEPTH, norm: str = "pre", **options: Any) -> Any:
    memory = {"name": "feedback", "length": LENGTH, **options}
    made_of = StackOptions(D, depth, H, 12, memory=memory, norm=norm, activation="relu")
    return wild(make_stack(made_of, causal=True, gives=("pieces",)))


def in_segments(stack: Stack, x_BTD: Tensor, pieces: list[int], cut: bool = False) -> Tensor:
    """Outputs of a stream that is cut into segments, and with `cut` its gradient too."""
    state, outs = stack.init_state(x_BTD.shape[0], x_BTD), []
    for x_BND in x_BTD.split(pieces, 1):
        out = stack(x_BND, state)
        state = states.detach(out.state) if cut else out.state
        outs.append(out.outputs)
    return torch.cat(outs, 1)


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.Identity):
        return x
    return (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias


class TwinRow:
    """One row, one token after the other, in lists."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.memory = stack, stack.model_memory
        self.blocks = list(stack.blocks)
        self.mixtures: list[Tensor] = []
        self.pairs: list[list[tuple[Tensor, Tensor]]] = []  # per token, per layer
        if self.memory.start == "zeros":
            self.mixtures = [torch.zeros(D, dtype=torch.float64)] * LENGTH
        self.begin()

    def begin(self) -> None:
        """A segment begins: keys and values anew, unless they are what is kept (zeros hold none)."""
        kept = self.pairs if self.memory.keep == "kv" else []
        zeros = [not m.any() for m in self.mixtures]
        self.pairs = [
            self.project(m) if zero or not kept else pair
            for m, zero, pair in zip(self.mixtures, zeros, kept or self.mixtures, strict=True)
        ]

    def cut(self) -> None:
        self.mixtures = [m.detach() for m in self.mixtures]
        self.pairs = [[(k.detach(), v.detach()) for k, v in pair] for pair in self.pairs]

    def project(self, m_D: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for index in range(len(self.blocks)):
            layer = self.blocks[0 if self.memory.shared_kv else index].attention
            h, w, b = layer_norm(m_D, layer.norm), layer.qkv.weight, layer.qkv.bias
            pairs.append((w[D : 2 * D] @ h + b[D : 2 * D], w[2 * D :] @ h + b[2 * D :]))
        return pairs

    def logit(self, layer: SelfAttention, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
        scheme = layer.positions
        if isinstance(scheme, LearnedDistances):
            return (q @ k + q @ self.memory.table_EM[:, LENGTH - distance]) / math.sqrt(E)
        return logit(scheme, q, k, head, sines(distance, D) if isinstance(scheme, RelativePositions) else None)

    def token(self, x_D: Tensor) -> Tensor:
        levels = [x_D]
        for index, block in enumerate(self.blocks):
            layer, x = block.attention, levels[-1]
            q_D = layer.qkv.weight[:D] @ layer_norm(x, layer.norm) + layer.qkv.bias[:D]
            heads = []
            for head in range(H):
                part = slice(head * E, (head + 1) * E)
                seen = [(len(self.pairs) - j, *pair[index]) for j, pair in enumerate(self.pairs)]
                if not seen:
                    heads.append(torch.zeros(E, dtype=torch.float64))
                    continue
                logits = [self.logit(layer, q_D[part], k[part], head, distance) for distance, k, _ in seen]
                weights = torch.stack(logits).softmax(0)
                heads.append(sum(w * v[part] for w, (_, _, v) in zip(weights, seen, strict=True)))
            y = layer_norm(x + layer.output(torch.cat(heads)), block.attention_norm)
            feed = block.feed_forward
            hidden = feed.enter(layer_norm(y, feed.norm)).clamp(min=0)
            levels.append(layer_norm(y + feed.leave(hidden), block.feed_forward_norm))
        share = self.memory.weight.exp() / self.memory.weight.exp().sum()
        mixture = sum(share[n] * level for n, level in enumerate(levels))
        self.mixtures = [*self.mixtures, mixture][-LENGTH:]
        self.pairs = [*self.pairs, self.project(mixture)][-LENGTH:]
        return layer_norm(levels[-1], self.stack.norm)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "separate": {"shared_kv": False},
    "relative": {"positions": "relative"},
    "none": {"positions": None},
    "zeros": {"start": "zeros"},
    "zeros-separate-relative": {"start": "zeros", "shared_kv": False, "positions": "relative"},
    "kv": {"keep": "kv"},
    "kv-zeros-separate": {"keep": "kv", "start": "zeros", "shared_kv": False},
    "post": {"norm": "post"},
}


@pytest.mark.parametrize("way", ["whole", "cut", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_its_slow_twin(name: str, way: str) -> None:
    stack, rows = make(**OPTIONS[name]), 2
    state, twins = stack.init_state(rows, torch.zeros((), dtype=torch.float64)), [TwinRow(stack) for _ in range(rows)]
    got, wanted, leaves = [], [], dict(stack.named_parameters())
    for x_BND, short in zip(inputs(3, 1, 4), (2, 0, 4), strict=True):
        n = x_BND.shape[1]
        leaves[f"inputs of {n}"] = x_BND.requires_grad_()
        padding_BN = torch.zeros(rows, n, dtype=torch.bool)
        if way == "padded":
            padding_BN[0, short:], padding_BN[1, :1] = True, n > 1
        out = stack(x_BND, state, padding_BN=padding_BN if way == "padded" else None)
        state = states.detach(out.state) if way == "cut" else out.state
        for row, twin in enumerate(twins):
            twin.begin()
            for i in (i for i in range(n) if not padding_BN[row, i]):
                wanted.append(twin.token(x_BND[row, i]))
                got.append(out.outputs[row, i])
            if way == "cut":
                twin.cut()
    gradients = agree([torch.stack(got)], [torch.stack(wanted)], leaves, least=None)
    assert gradients["model_memory.weight"].abs().max() > 1e-6


def golden_model(golden: dict[str, Any], tag: str) -> tuple[nn.Module, Tensor, dict[str, list[Tensor]]]:
    """The model with the weights of a reference, its output bias, and the parameters by their name there."""
    config = json.loads(str(golden[f"{tag}/config"]))
    start = f"{tag}/param/"
    theirs = {k.removeprefix(start): torch.tensor(v) for k, v in golden.items() if k.startswith(start)}
    pre, shared = config["pre_norm"], config["share_proj_kv"]
    memory = {"name": "feedback", "length": config["attn_lim"], "shared_kv": shared, "start": "zeros"}
    sizes = {"vocabulary": "vocab_sz", "width": "hid_sz", "depth": "nlayers", "heads": "nheads"}
    given = {ours: config[theirs] for ours, theirs in {**sizes, "feed_forward": "inner_hid_sz"}.items()}
    given |= {"norm": "pre" if pre else "post", "activation": "relu", "bias": False, "tied": False}
    model = create_model("language_model", memory={**memory, "official_renorm": True}, **given).double()
    places: dict[str, list[Tensor]] = {
        "single_memory_attn_params": [model.stack.model_memory.weight],
        "in_emb.weight": [model.embedding.weight],
        "layers.0.attn.attn.key_pe": [model.stack.model_memory.table_EM],
        "out.out_emb.weight": [model.head.weight],
    }
    if "out_norm.weight" in theirs:
        places |= {f"out_norm.{kind}": [getattr(model.stack.norm, kind)] for kind in ("weight", "bias")}
    for index, block in enumerate(model.stack.blocks):
        name, first = f"layers.{index}", "layers.0" if shared else f"layers.{index}"
        attention, feed = block.attention, block.feed_forward
        norms = (attention.norm, feed.norm) if pre else (block.attention_norm, block.feed_forward_norm)
        for kind in ("weight", "bias"):
            places.setdefault(f"{first}.norm1.{kind}", []).append(getattr(norms[0], kind))
            places[f"{name}.norm2.{kind}"] = [getattr(norms[1], kind)]
            places[f"{name}.ff.fc1.{kind}"] = [getattr(feed.enter, kind)]
            places[f"{name}.ff.fc2.{kind}"] = [getattr(feed.leave, kind)]
        places[f"{name}.attn.proj_out.weight"] = [attention.output.weight]
        parts = attention.qkv.weight.split(config["hid_sz"])
        for part, kind in zip(parts, ("query", "key", "val"), strict=False):
            places[f"{name}.attn.proj_{kind}.weight"] = [part]
    bias_V = theirs.pop("out.out_emb.bias")
    assert places.keys() == theirs.keys()
    with torch.no_grad():
        for key, targets in places.items():
            for target in targets:
                target.copy_(theirs[key].view_as(target))
    return model, bias_V, places


@pytest.mark.device
@pytest.mark.parametrize("tag", ["sep_kv", "share_kv", "postnorm"])
def test_golden_values_of_the_authors_code(shared: Path, tag: str) -> None:
    golden = {k: v for k, v in np.load(shared / "golden/memories/feedback.npz", allow_pickle=False).items()}
    model, bias_V, _ = golden_model(golden, tag)
    ids, state = torch.tensor(golden["ids"]), None
    for segment in range(5):
        out = model(ids[:, 8 * segment : 8 * segment + 8], state)
        state = states.detach(out.state)
        want = torch.tensor(golden[f"{tag}/seg{segment}/logprob"])
        torch.testing.assert_close((out.outputs + bias_V).log_softmax(-1), want, rtol=0, atol=1e-12)
        cache = torch.tensor(golden[f"{tag}/seg{segment}/cache0"]).transpose(0, 1)
        torch.testing.assert_close(state.model.hidden_BMD, cache, rtol=0, atol=1e-12)


@pytest.mark.device
def test_golden_gradients_of_the_authors_code(shared: Path) -> None:
    golden = {k: v for k, v in np.load(shared / "golden/memories/feedback.npz", allow_pickle=False).items()}
    model, bias_V, places = golden_model(golden, "share_kv")
    ids = torch.tensor(golden["ids"])
    logits = model(ids[:, :8]).outputs + bias_V
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:9].flatten())
    torch.testing.assert_close(loss.detach(), torch.tensor(golden["grad_seg0/loss"]), rtol=0, atol=1e-12)
    loss.backward()
    # A part of the fused projection finds its gradient in that of the whole.
    wholes = {b.attention.qkv.weight.data_ptr(): b.attention.qkv.weight for b in model.stack.blocks}

    def gradient(target: Tensor) -> Tensor:
        whole = wholes.get(target.untyped_storage().data_ptr(), target)
        return whole.grad.as_strided(target.shape, target.stride(), target.storage_offset())

    for name, targets in places.items():
        want = torch.tensor(golden[f"grad_seg0/{name}"])
        torch.testing.assert_close(sum(map(gradient, targets)).view_as(want), want, rtol=0, atol=1e-12)


CUTS = [[12], [1] * 12, [5, 1, 4, 2]]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_a_run_that_puts_off_and_shares_nothing(name: str) -> None:
    """With padding that pads nothing, every token has a copy of the store; and activations may be computed again."""
    stack, x_BTD = make(**OPTIONS[name]), torch.randn(2, 6, D, dtype=torch.float64)
    nothing_BN, grads = torch.zeros(2, 6, dtype=torch.bool), []
    for again, padding_BN in ((False, nothing_BN), (False, None), (True, None)):
        stack.activation_checkpointing = again
        loss = stack(x_BTD, positions_BNP=torch.arange(6).expand(2, 6)[..., None], padding_BN=padding_BN).outputs.sin()
        grads.append(torch.autograd.grad(loss.sum(), list(stack.parameters()), allow_unused=True))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-6 if "relative" in name else 1e-12)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=1e-12)


def test_the_second_norm_matters_and_layers_attend_no_segment() -> None:
    x_BTD = torch.randn(2, 12, D, dtype=torch.float64)
    for norm, matters in (("pre", True), ("post", False)):
        stack = make(norm=norm, official_renorm=True)
        whole, *others = (in_segments(stack, x_BTD, cut) for cut in CUTS)
        assert all(((other - whole).abs().max() > 1e-3) == matters for other in others)

    def block(_: int) -> Block:
        return Block(SelfAttention(D, H, causal=True), FeedForward(D, D))

    refuses(r"memory Feedback .*make layer 0", Stack, block, 1, model_memory=Feedback(D, H))
    refuses("this layer has no keys and values", ContextAttention(D, H).project_kv, torch.zeros(1, 1, D))


def test_an_empty_start_shows_nothing_and_zeros_are_attended() -> None:
    torch.manual_seed(3)
    stack, x_BTD = make(), torch.randn(2, 6, D, dtype=torch.float64)
    empty = in_segments(stack, x_BTD, [6])
    x_BD = x_BTD[:, 0]
    for block in stack.blocks:  # no key: attention gives 0, and its projection the bias
        y_BD = x_BD + block.attention.output.bias
        x_BD = y_BD + block.feed_forward(y_BD)
    torch.testing.assert_close(empty[:, 0], stack.norm(x_BD))
    stack.model_memory.start = "zeros"
    zeros = in_segments(stack, x_BTD, [6])
    assert (zeros - empty).abs().amax((0, 2)).min() > 1e-6
    for start, want in (("empty", empty), ("zeros", zeros)):  # poison in empty slots never comes out, nor back
        stack.model_memory.start = start
        state = states.map_state(
            lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t, stack.init_state(2, x_BTD)
        )
        stack.zero_grad()
        for padding_BN in (None, torch.zeros(2, 6, dtype=torch.bool)):
            got = stack(x_BTD, state, padding_BN=padding_BN).outputs
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            got.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in stack.parameters())
