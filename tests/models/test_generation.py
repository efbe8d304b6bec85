"""Generation: inputs of the model, selected tokens, ends of rows, and the final state.

Legend: B rows, N tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from common import refuses, stirred
from memories.harness import run
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.models.generation import generate
from cached_transformers.models.sampling import keep_likely

V, SEGMENT = 7, 4
MEMORIES: dict[str, Any] = {
    "none": None,
    "transformer_xl": {"name": "transformer_xl", "length": 5},
    "grc_stream": {"name": "grc_stream", "length": 3},
    "block_retrieval": {"name": "block_retrieval", "recent": 2, "block": 2, "topk": 1, "retrieve": "segments"},
}


def build(memory: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"vocabulary": V, "width": 16, "depth": 2, "heads": 2, "feed_forward": 16, "tied": False}
    model = create_model("language_model", **{**sizes, "memory": memory, **options}).double()
    return stirred(model, 0.5)


@pytest.fixture(params=MEMORIES.values(), ids=MEMORIES)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def by_segments(model: Any, text_BN: Tensor) -> tuple[Tensor, Any]:
    """Log-probabilities at each place, and the state, of a text cut as in training."""
    outs = run(model, text_BN.split(SEGMENT, 1))
    return torch.cat([out.outputs.log_softmax(-1) for out in outs], 1), outs[-1].state


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


class Table(nn.Module):
    """A hand-made model: the next token's scores depend on the last two tokens (a state) and the number of tokens."""

    def __init__(self, words: int, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(6, words, words, words, generator=generator).double()

    def init_state(self, rows: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)

    def forward(self, tokens_BN: Tensor, state: tuple[Tensor, Tensor]) -> ModelOutput:
        seen_B, last_B = state
        outputs = []
        for token_B in tokens_BN.unbind(1):
            outputs.append(self.table[seen_B % 6, last_B, token_B])
            seen_B, last_B = seen_B + 1, token_B
        return ModelOutput(torch.stack(outputs, 1), (seen_B, last_B), torch.zeros(()))


def test_a_carried_state_is_read_and_left_alone(model: Any) -> None:
    before, prompt = torch.randint(V, (2, 8)), torch.randint(V, (2, 3))
    with torch.no_grad():
        _, state = by_segments(model.eval(), before)
    kept = states.map_state(torch.clone, state)
    found = model.generate(prompt, state, tokens=6, temperature=0, segment_length=SEGMENT)
    whole = model.generate(torch.cat([before, prompt], 1), tokens=6, temperature=0, segment_length=SEGMENT)
    assert torch.equal(found.tokens, whole.tokens)
    close(found.state, whole.state)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"beams": 3}], ids=str)
def test_rows_stop_at_their_end_and_do_not_touch_each_other(model: Any, options: Any) -> None:
    prompts = torch.randint(V, (12, 3))
    options = {"tokens": 9, "segment_length": SEGMENT, **options}
    # The end that makes the rows differ most: rows of one length would prove nothing.
    eos = max(range(V), key=lambda eos: len(set(model.generate(prompts, eos=eos, **options).lengths.tolist())))
    options["eos"] = eos
    found = model.generate(prompts, **options)
    assert len(set(found.lengths.tolist())) > 2
    for row in range(12):
        alone = model.generate(prompts[row : row + 1], **options)
        n = int(alone.lengths)
        assert n == found.lengths[row] and alone.tokens.shape == (1, n)
        assert torch.equal(alone.tokens[0], found.tokens[row, :n])
        assert (found.tokens[row, n:] == eos).all() and eos not in alone.tokens[0, :-1]
        close(alone.scores[0], found.scores[row])
        with torch.no_grad():
            _, state = by_segments(model.eval(), torch.cat([prompts[row], alone.tokens[0, :-1]])[None])
        close(alone.state, state)
        close(states.reorder(found.state, torch.tensor([row])), state)
    assert found.tokens.shape[1] == found.lengths.max()


def continuations(words: int, tokens: int, eos: int | None) -> list[tuple[int, ...]]:
    """All that can be generated: full length, or ended by `eos`."""
    found = []
    for length in range(1, tokens + 1):
        for text in itertools.product(range(words), repeat=length):
            if eos not in text[:-1] and (length == tokens or text[-1] == eos):
                found.append(text)
    return found


def log_probability(model: Table, prompt: Tensor, text: tuple[int, ...]) -> float:
    whole = torch.cat([prompt, torch.tensor(text)])[None]
    logp = model(whole, model.init_state(1)).outputs.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return sum(logp[i, token].item() for i, token in enumerate(text))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [None, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_wide_beams_find_the_best_of_all_continuations(penalty: float, eos: int | None, seed: int) -> None:
    model, words, tokens = Table(3, seed), 3, 4
    prompts = torch.tensor([[0, 1], [2, 2]])
    found = generate(model, prompts, tokens=tokens, beams=81, eos=eos, length_penalty=penalty, segment_length=SEGMENT)
    for row, prompt in enumerate(prompts):
        scores = {text: log_probability(model, prompt, text) for text in continuations(words, tokens, eos)}
        best = max(scores, key=lambda text: scores[text] / len(text) ** penalty)
        n = int(found.lengths[row])
        assert tuple(found.tokens[row, :n].tolist()) == best
        assert found.scores[row].item() == pytest.approx(scores[best], abs=1e-10)
    greedy = generate(model, prompts, tokens=tokens, temperature=0, eos=eos, segment_length=SEGMENT)
    rank = [g.scores / g.lengths**penalty for g in (found, greedy)]
    assert (rank[0] >= rank[1] - 1e-12).all()


def slow_beams(model: Table, prompt: Tensor, tokens: int, beams: int, eos: int, penalty: float) -> tuple[int, ...]:
    """Beam search over lists of tokens, each scored from scratch."""
    live: list[tuple[int, ...]] = [()]
    done: dict[tuple[int, ...], float] = {}
    for step in range(tokens):
        grown = [(*text, word) for text in live for word in range(model.table.shape[-1])]
        score = {text: log_probability(model, prompt, text) for text in grown}
        grown.sort(key=lambda text: -score[text])
        live = [text for text in grown if text[-1] != eos][:beams]
        if step == tokens - 1:
            done |= {text: score[text] / tokens**penalty for text in grown[:beams]}
        else:
            done |= {text: score[text] / len(text) ** penalty for text in grown[:beams] if text[-1] == eos}
        if sum(text[-1] == eos for text in done) >= beams:
            break
    return max(done, key=lambda text: done[text])


@pytest.mark.parametrize("seed", range(6))
def test_narrow_beams_keep_what_a_slow_twin_keeps(seed: int) -> None:
    model = Table(5, seed, scale=0.7)
    prompts = torch.randint(5, (4, 2))
    options: dict[str, Any] = {"tokens": 5, "beams": 2, "eos": 3, "length_penalty": 0.5}
    found = generate(model, prompts, segment_length=SEGMENT, **options)
    for row, prompt in enumerate(prompts):
        want = slow_beams(model, prompt, 5, 2, 3, 0.5)
        assert tuple(found.tokens[row, : found.lengths[row]].tolist()) == want
        seen, last = states.reorder(found.state, torch.tensor([row]))
        assert seen.item() == len(prompt) + len(want) - 1 and last.item() == [*prompt.tolist(), *want][-2]


def test_seeds_reproduce_and_tokens_have_their_probabilities() -> None:
    model, rows = Table(4, scale=1.5), 20000
    prompt = torch.tensor([[1, 2]]).expand(rows, -1)

    def draw(seed: int, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, tokens=1, generator=generator, segment_length=9, **options).tokens[:, 0]

    assert torch.equal(draw(5), draw(5)) and not torch.equal(draw(5), draw(6))
    logits = model(prompt[:1], model.init_state(1)).outputs[0, -1]
    for temperature in (0.5, 1.0, 2.0):
        share = torch.bincount(draw(0, temperature=temperature), minlength=4) / rows
        torch.testing.assert_close(share.double(), (logits / temperature).softmax(-1), rtol=0, atol=0.015)
    assert (draw(0, top_k=1) == logits.argmax()).all() and (draw(0, top_p=1e-9) == logits.argmax()).all()
    two = logits.topk(2)
    share = torch.bincount(draw(0, top_k=2), minlength=4)[two.indices] / rows
    torch.testing.assert_close(share.double(), two.values.softmax(-1), rtol=0, atol=0.015)


def test_the_nucleus_is_the_smallest_set_with_the_probability() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.25, 0.05], [0.1, 0.1, 0.1, 0.7]]).log()

    def kept(**options: Any) -> list[list[int]]:
        return [row.isfinite().nonzero()[:, 0].tolist() for row in keep_likely(logits, **options)]

    assert kept(top_p=0.74) == [[0, 2], [0, 3]]
    assert kept(top_p=0.76) == [[0, 1, 2], [0, 3]]
    assert kept(top_p=0.4) == [[0], [3]]
    assert kept(top_p=1.0) == kept() == kept(top_k=9) == [[0, 1, 2, 3]] * 2
    assert [len(row) for row in kept(top_k=2)] == [2, 2]  # two of three equal tokens too
    assert kept(top_k=2, top_p=0.6) == [[0], [3]]  # of the two, 2/3 and 1/3; 7/8 and 1/8


def test_sampled_scores_are_the_models_own() -> None:
    model = build().eval()
    prompt = torch.randint(V, (3, 2))
    found = model.generate(prompt, tokens=5, temperature=2.0, top_k=4)
    with torch.no_grad():
        logp = model(torch.cat([prompt, found.tokens], 1)).outputs.log_softmax(-1)[:, 1:-1]
    close(found.scores, logp.gather(-1, found.tokens[..., None])[..., 0].sum(1))


@pytest.mark.parametrize("options", [{"beams": 2}, {"temperature": 0}, {}], ids=str)
def test_an_adaptive_model_generates(options: Any) -> None:
    model = build({"name": "transformer_xl", "length": 5}, cutoffs=[2, 4], div_value=2, scale_embedding=True)
    found = model.generate(torch.randint(V, (2, 5)), tokens=6, segment_length=SEGMENT, **options)
    assert found.tokens.shape == (2, 6) and found.scores.isfinite().all()


def test_each_step_is_told_before_the_next_one_is_read(model: Any) -> None:
    told: list[Tensor] = []
    read: list[int] = []
    model.embedding.register_forward_pre_hook(lambda *_: read.append(len(told)))
    prompt = torch.randint(V, (3, 2))
    found = model.generate(prompt, tokens=5, eos=2, segment_length=SEGMENT, each=told.append)
    assert read == sorted(read) and {*read} == {*range(len(told) + 1)}  # at the end the state is made
    assert torch.equal(torch.stack(told, 1), found.tokens)


def test_no_gradient_and_every_module_keeps_its_mode(model: Any) -> None:
    model.train()
    model.stack.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    seen: list[bool] = []
    model.stack.register_forward_hook(lambda module, args, out: seen.append(module.training or torch.is_grad_enabled()))
    found = model.generate(torch.zeros(1, 1, dtype=torch.long), tokens=2, segment_length=SEGMENT)
    assert seen and not any(seen)
    assert [module.training for module in model.modules()] == modes
    assert not found.scores.requires_grad and torch.is_grad_enabled()
    refuses("eos=7", model.generate, torch.zeros(1, 1, dtype=torch.long), tokens=2, segment_length=SEGMENT, eos=7)
    assert [module.training for module in model.modules()] == modes, "the mode comes back after an error too"


PROMPT = torch.zeros(1, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"beams": 0}, "beams=0"),
        ({"segment_length": 0}, "segment_length=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 0, "top_k": 3}, "temperature=0"),
        ({"beams": 2, "top_p": 0.5}, "beams=2.*top_p=0.5"),
        ({"beams": 2, "temperature": 0.7}, "temperature=0.7"),
        ({"length_penalty": 2.0}, "take beams=2 or more"),
        ({"beams": 2, "length_penalty": math.nan}, "length_penalty=nan"),
        ({"beams": 2, "each": print}, "beams=2 chooses its tokens at the end"),
        ({"eos": -1}, "eos=-1"),
        ({"eos": V}, "eos=7 is not in the vocabulary of 7"),
        ({"segment_length": None}, "segment_length=None.*give segment_length"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    model = build({"name": "transformer_xl", "length": 5})
    refuses(message, model.generate, PROMPT, **{"tokens": 2, "segment_length": SEGMENT, **options})
    refuses("not in a vocabulary of 7", model.generate, PROMPT + V, tokens=2, segment_length=SEGMENT)
