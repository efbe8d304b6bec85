"""The weights that each query gives each key, drawn as heat maps.

All attentions are linear in their values for given queries and keys. With one-hot values the output of query i is the
row of its weights w_i1 .. w_iN, including the shares of tokens that it sees through a summary, and negative weights.

If a mechanism also mixes channels (by a convolution, say), a weight is a matrix, out_i = sum_j W_ij v_j. Random values
then measure its size |W_ij| / sqrt(V), equal to |w| if W is w times the identity.

Legend: B draws, H heads, N tokens, V value width, D model width.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cached_transformers.attentions import Attention, AttentionSpec, create_attention
from cached_transformers.extras import require
from cached_transformers.registry import ATTENTIONS

from ..formatting import counted
from .style import blank_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, DRAWS, HEADS = 64, 4, 2
FULL = 0.99
"""Share of the weights with distinct colours; larger weights have the darkest one."""
NEVER = 1e-12
"""Smaller mean weights are rounding errors."""


@torch.no_grad()
def attention_weights(
    attention: AttentionSpec, tokens: int = TOKENS, *, causal: bool = False, draws: int = DRAWS, seed: int = 0
) -> Tensor:
    """(N, N), float64: the weight of each token for each query, mean over draws and heads; its size if channels mix.

    The attention is untrained; queries, keys and the layer's input are standard normal.

    Args:
        attention: name, or {"name": ..., option: value}.
        draws: rows of the batch. seed: of the attention's own randomness and of the draws.
    """
    for name, value in {"tokens": tokens, "draws": draws}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        core = _core(attention, tokens, causal=causal)
        q_BHNV, k_BHNV = torch.randn(2, draws, HEADS, tokens, tokens, dtype=torch.double)
        x_BND = torch.randn(draws, tokens, HEADS * tokens, dtype=torch.double)

        def run(v_BHNV: Tensor, rows: slice = slice(None)) -> Tensor:
            q, k, x = (t[rows].expand(len(v_BHNV), *t.shape[1:]) for t in (q_BHNV, k_BHNV, x_BND))
            generator = torch.Generator().manual_seed(seed)
            out: Tensor = core(q, k, v_BHNV, causal=causal, x_BND=x, generator=generator).out_BHNV
            return out

        one_hot_BHNN = torch.eye(tokens, dtype=torch.double).expand(draws, HEADS, tokens, tokens)
        weights_BHNN = run(one_hot_BHNN)
        if torch.allclose(run(one_hot_BHNN.roll(1, -1)), weights_BHNN.roll(1, -1), rtol=0, atol=1e-9):
            return weights_BHNN.mean((0, 1))
        sizes_NN = torch.zeros(tokens, tokens, dtype=torch.double)
        for row in range(draws):
            # A row of the batch per key, the only one with a value.
            value_HNV = torch.randn(HEADS, tokens, tokens, dtype=torch.double)
            alone_NHNV = value_HNV * torch.eye(tokens, dtype=torch.double)[:, None, :, None]
            change_NHNV = run(alone_NHNV, slice(row, row + 1)) - run(torch.zeros_like(alone_NHNV), slice(row, row + 1))
            sizes_NN += change_NHNV.square().mean(-1).sqrt().mean(1).T / draws
        return sizes_NN


def _core(attention: AttentionSpec, tokens: int, *, causal: bool) -> Attention:
    """The attention of a layer with heads as wide as the text is long, for mechanisms that need V = E."""
    height = max(h for h in range(1, int(tokens**0.5) + 1) if tokens % h == 0)
    facts = {"length": tokens, "prefix": 0, "size": (height, tokens // height), "index": 0, "depth": 1}
    return create_attention(attention, width=HEADS * tokens, heads=HEADS, causal=causal, **facts).double().eval()


def pattern_figure(attention: AttentionSpec, tokens: int = TOKENS, *, draws: int = DRAWS, seed: int = 0) -> Figure:
    """Heat maps of `attention_weights` over all keys, and causal ones, as far as the mechanism has these forms.

    Keys that no draw attends stay blank. Colour grows with the square root of the weight. If the pattern depends on
    content, one draw shows a pattern, and many show its frequencies.
    """
    colours = require("matplotlib.colors", extra="plot")
    with torch.random.fork_rng(devices=[]):
        can = _core(attention, max(tokens, 1), causal=False).can
    forms = [form for form in ("bidirectional", "causal") if form in can]
    found = [attention_weights(attention, tokens, causal=f == "causal", draws=draws, seed=seed) for f in forms]
    shown = [weights_NN.masked_fill(weights_NN.abs() < NEVER, torch.nan) for weights_NN in found]
    # The first causal queries see few keys: with the whole range all other weights would be pale.
    most = float(torch.cat([t.abs().flatten() for t in shown]).nanquantile(FULL))
    signed = any(bool((t < 0).any()) for t in shown)
    root, square = (lambda w: np.sign(w) * np.sqrt(np.abs(w))), (lambda h: np.sign(h) * np.square(h))
    norm = colours.FuncNorm((root, square), vmin=-most if signed else 0, vmax=most)
    figure, axes = blank_figure(0.9 + 4.0 * len(forms), 4.8, 1, len(forms))
    with style():
        for ax, form, weights_NN in zip(axes[0], forms, shown, strict=True):
            image = ax.imshow(
                weights_NN.numpy(), norm=norm, cmap="RdBu" if signed else "Blues", interpolation="nearest"
            )
            ax.set(title="causal" if form == "causal" else "all keys", xlabel="key", ylabel="query")
            ax.grid(False)
        bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.72, aspect=28, extend="both" if signed else "max")
        bar.set_label(f"weight, mean of {counted(draws, 'draw')} and {HEADS} heads")
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
        figure.suptitle(textwrap.fill(describe(attention), 46 * len(forms)), x=0.012, ha="left", fontsize=11)
    return figure


def describe(attention: AttentionSpec) -> str:
    """Name, given options and the order of growth, e.g. "star (radius=1): order N R"."""
    given = {"name": attention} if isinstance(attention, str) else dict(attention)
    name = str(given.pop("name"))
    shown = ", ".join(f"{option}={value!r}" for option, value in given.items())
    return f"{name}{f' ({shown})' if shown else ''}: order {ATTENTIONS.entry(name).info.get('order', 'unknown')}"
