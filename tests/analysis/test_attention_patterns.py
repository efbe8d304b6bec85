"""The picture of a mechanism holds the weights that it has, seen through values of one-hot vectors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from attentions.cases import CASES
from common import refuses
from torch import Tensor

from cached_lab.cli.main import main
from cached_lab.experiments.reports.figures import attention_patterns as patterns
from cached_lab.experiments.reports.figures.attention_patterns import attention_weights, describe, pattern_figure
from cached_lab.yaml_tree import apply_override
from cached_transformers.attentions import Attention, AttentionOutput, Call, create_attention
from cached_transformers.registry import ATTENTIONS

N = 12


class Signed(Attention):
    """Weights of both signs, without a softmax."""

    def __init__(self, *, factor: float = 0.5) -> None:
        super().__init__()
        self.factor = factor

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        near_NN = torch.ones(q_BHNE.shape[2], q_BHNE.shape[2], dtype=q_BHNE.dtype).tril(1).triu(-1)
        return AttentionOutput(self.factor * (q_BHNE @ k_BHNE.mT) * near_NN @ v_BHNV)


class Mixing(Attention):
    """The last two tokens alike, rotated in their channels, and a bias."""

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        last_BH1V = 0.5 * v_BHNV[:, :, -2:].flip(-1).mean(2, keepdim=True) * (-1) ** torch.arange(v_BHNV.shape[-1])
        return AttentionOutput((last_BH1V + 7).expand_as(v_BHNV))


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ATTENTIONS, "_entries", dict(ATTENTIONS._entries))
    ATTENTIONS.register("signed", order="N")(Signed)
    ATTENTIONS.register("mixing", order="N")(Mixing)
    return "signed"


def draws_of(seed: int, draws: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k = torch.randn(2, draws, patterns.HEADS, N, N, dtype=torch.double)
    return q, k


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_shows_its_dense_weights(causal: bool) -> None:
    q, k = draws_of(3, 5)
    logits = q @ k.mT / N**0.5
    if causal:
        logits = logits.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    want = logits.softmax(-1).mean((0, 1))
    before = torch.random.get_rng_state()
    got = attention_weights("softmax", N, causal=causal, draws=5, seed=3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_sparse_pattern_is_that_of_its_definition() -> None:
    spec = {"name": "star", "radius": 2, "embedding": False, "relay": False}
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    near = torch.minimum(distance, N - distance) <= 2
    weights = attention_weights(spec, N)
    assert torch.equal(weights > patterns.NEVER, near)
    torch.testing.assert_close(weights.sum(1), torch.ones(N).double())
    causal = attention_weights(spec, N, causal=True)
    assert torch.equal(causal > patterns.NEVER, (distance <= 2).tril())


def test_a_summary_shows_the_share_of_each_token() -> None:
    weights = attention_weights({"name": "bp_transformer", "k": 1}, 16)
    spans = [(0, 2), (2, 4), (8, 12), (12, 16)]  # of token 5: 5 | 4, 2-3, 0-1 | 6, 7, 8-11, 12-15
    for first, end in spans:
        assert (weights[5, first:end] - weights[5, first]).abs().max() < 1e-12
    assert (weights > 0).all()


def test_weights_of_a_mechanism_without_softmax_keep_their_sign(signed: str) -> None:
    q, k = draws_of(0, 4)
    want = (0.5 * q @ k.mT).mean((0, 1)) * torch.ones(N, N).tril(1).triu(-1)
    torch.testing.assert_close(attention_weights(signed, N), want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("signed")
def test_where_channels_mix_the_size_of_a_weight_is_measured() -> None:
    weights = attention_weights("mixing", N, draws=64)
    assert (weights[:, :-2] == 0).all()
    torch.testing.assert_close(weights[:, -2:], torch.full((N, 2), 0.25).double(), rtol=0.1, atol=0)


def test_wrong_sizes_and_forms_are_refused(signed: str) -> None:
    refuses("tokens=0", attention_weights, "softmax", 0)
    refuses("draws=0", attention_weights, "softmax", 4, draws=0)
    refuses(r"needs causal \(.*\), which attention \w+ does not give", attention_weights, signed, 4, causal=True)
    refuses(r"'star'.*'radios'", attention_weights, {"name": "star", "radios": 2}, 4)


def test_the_figure_holds_the_weights_side_by_side(signed: str) -> None:
    pytest.importorskip("matplotlib")
    spec = {"name": "star", "relay": False}
    figure = pattern_figure(spec, N)
    first, second, bar = figure.axes
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["all keys", "causal"]
    assert figure.get_suptitle() == describe(spec) == "star (relay=False): order N R"
    for ax, causal in ((first, False), (second, True)):
        drawn, want = ax.images[0].get_array(), attention_weights(spec, N, causal=causal)
        blank = torch.from_numpy(drawn.mask)
        assert torch.equal(blank, want.abs() < patterns.NEVER)
        torch.testing.assert_close(torch.from_numpy(drawn.data)[~blank], want[~blank], rtol=0, atol=1e-12)
    assert first.images[0].norm is second.images[0].norm and first.images[0].norm.vmin == 0
    assert "4 draws" in bar.get_ylabel()
    alone, _ = pattern_figure(signed, N).axes
    norm = alone.images[0].norm
    assert norm.vmin == -norm.vmax and alone.get_title(loc="left") == "all keys"
    assert float(norm(0.0)) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ATTENTIONS.names())
def test_every_mechanism_has_a_pattern(name: str) -> None:
    spec = {"name": name, **CASES[name].options}
    for form in {"bidirectional", "causal"} & ATTENTIONS.entry(name).factory.can:
        weights_NN = attention_weights(spec, N, causal=form == "causal", draws=2)
        assert weights_NN.shape == (N, N) and weights_NN.isfinite().all() and (weights_NN != 0).any()
        assert form == "bidirectional" or (weights_NN.triu(1).abs() < patterns.NEVER).all()


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    return status, *capsys.readouterr()


def test_explain_draws_an_attention(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "star.svg"
    status, out, err = call(capsys, "explain", "star", "radius=2", "--plot", str(path), "--tokens", "9", "--draws", "1")
    assert (status, err) == (0, "") and out.startswith("star (attention)")
    assert "star (radius=2)" in path.read_text() and "mean of one draw and 2 heads" in path.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["grc", "--plot", "x.png"], "unknown attention 'grc'"), (["star", "--plot", "x.xyz"], "'xyz' is not supported")],
)
def test_explain_refuses_other_pictures(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    status, out, err = call(capsys, "explain", *words)
    assert (status, out) == (2, "") and message in err


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "attentions.md").read_text()


def test_every_attention_has_a_section() -> None:
    assert sorted(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == sorted(ATTENTIONS.names())


@pytest.mark.parametrize("name", ATTENTIONS.names())
def test_a_section_says_what_the_registry_says_and_how_its_picture_is_drawn(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    info = ATTENTIONS.entry(name).info
    for fact in ("equation", "order"):
        assert str(info[fact]) in section, f"{fact} of {name} is not that of `cached explain {name}`"
    command = shlex.split(re.findall(r"^cached explain .*$", section, re.MULTILINE)[0])
    picture = f"images/attentions/{name}.png"
    assert command[:3] == ["cached", "explain", name] and command[-2:] == ["--plot", f"docs/{picture}"]
    assert f"]({picture})" in section and (DOCS / picture).is_file()
    spec = {"name": name}
    for part in command[3:-2]:
        if "=" in part:
            apply_override(spec, part)
    create_attention(spec, width=128, heads=2, length=64, prefix=0, size=(8, 8), index=0, depth=1, causal=False)
