"""Output caches against loops over tokens, and their properties."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import refuses
from integrations.hosts import library
from torch import Tensor

from cached_lab.output_caches import KNNLM, Datastore, NeuralCache, OutputCache, hidden_states, knn_lm
from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.layers.token_loss import IGNORED

B, N, D, V = 2, 23, 5, 11


class Text:
    """Logits, hidden states and next tokens of a made-up text, float64."""

    def __init__(self, tokens: int = N, few: int = 4) -> None:
        self.logits = 3 * torch.randn(B, tokens, V, dtype=torch.float64)
        self.h = torch.randn(B, tokens, D, dtype=torch.float64)
        self.next = torch.randint(0, few, (B, tokens))

    @property
    def model(self) -> Tensor:
        return self.logits.softmax(-1)

    def probabilities(self, cache: OutputCache, lengths: tuple[int, ...] = ()) -> Tensor:
        """Mixed probabilities of the text, read in segments of these lengths and the rest."""
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist(), self.next.shape[1]]
        state, parts = None, []
        for part in (slice(*pair) for pair in pairwise(bounds)):
            out, state = cache(self.logits[:, part], self.h[:, part], self.next[:, part], state)
            parts.append(out.exp())
        return torch.cat(parts, 1)


def twin(text: Text, size: int, theta: float, share: float) -> Tensor:
    """Token by token: a list of the latest pairs."""
    out = torch.zeros(B, text.next.shape[1], V, dtype=torch.float64)
    for row in range(B):
        pairs: list[tuple[Tensor, int]] = []
        for t, h in enumerate(text.h[row]):
            copied = torch.zeros(V, dtype=torch.float64)
            for key, token in pairs:
                copied[token] += math.exp(theta * float(h @ key))
            out[row, t] = text.model[row, t]
            if pairs:
                out[row, t] = (1 - share) * text.model[row, t] + share * copied / copied.sum()
            if int(text.next[row, t]) != IGNORED:
                pairs = [*pairs, (h, int(text.next[row, t]))][-size:]
    return out


@pytest.mark.parametrize(("theta", "share"), [(0.4, 0.3), (0.0, 1.0)])
@pytest.mark.parametrize("size", [1, 6, 100])
def test_it_is_a_loop_over_tokens_in_any_segments(size: int, theta: float, share: float) -> None:
    text = Text()
    text.next[1, 3:6] = IGNORED
    cache = NeuralCache(size, theta, share)
    for lengths in [(), (1,) * (N - 1), (7,) * 3, (2, 15), (22,)]:
        torch.testing.assert_close(text.probabilities(cache, lengths), twin(text, size, theta, share))


def test_lambda_0_and_an_empty_cache_are_the_model() -> None:
    text = Text()
    for cache in (NeuralCache(9, lambda_=0.0), knn(text, k=3, lambda_=0.0)):
        assert torch.equal(cache(text.logits, text.h, text.next).log_probabilities, text.logits.log_softmax(-1))
    text = Text(1)
    cache = NeuralCache(4, theta=2.0, lambda_=0.9)
    state = cache.init_state(B, text.h)
    poison = state._replace(k_BHME=torch.full_like(state.k_BHME, torch.nan), v_BHME=state.v_BHME + 3)
    found = cache(text.logits, text.h, text.next, poison).log_probabilities
    assert torch.equal(found, text.logits.log_softmax(-1))


def test_a_state_keeps_its_form_and_no_odd_numbers() -> None:
    text, cache = Text(), NeuralCache(6)
    first = cache(text.logits, text.h, text.next).state
    kept = states.map_state(torch.clone, first)
    second = cache(text.logits, text.h, text.next, first).state
    assert states.signature(first) == states.signature(second) == states.signature(cache.init_state(B, text.h))
    for (name, one), (_, other) in zip(states.named_tensors(first), states.named_tensors(kept), strict=True):
        assert torch.equal(one, other), name
    text, cache = Text(), NeuralCache(30, 0.5, 0.5)
    text.h[0, 5] = torch.nan
    state = cache(text.logits, text.h, text.next).state
    assert state.written_B.tolist() == [N - 1, N] and state.k_BHME.isfinite().all()
    fresh = Text()
    assert cache(fresh.logits, fresh.h, fresh.next, state).log_probabilities.isfinite().all()


def knn(text: Text, entries: int = 40, dtype: torch.dtype = torch.float32, **options: Any) -> KNNLM:
    return KNNLM(Datastore(torch.randn(entries, D).to(dtype), torch.randint(0, 4, (entries,))), **options)


@pytest.mark.parametrize("temperature", [0.8, math.inf])
@pytest.mark.parametrize("k", [1, 7, 40, 99])
def test_neighbours_are_what_a_loop_over_the_datastore_finds(k: int, temperature: float) -> None:
    text = Text()
    cache = knn(text, k=k, temperature=temperature, lambda_=0.35)
    found = text.probabilities(cache)
    for row in range(B):
        for t in range(N):
            distances = [float((text.h[row, t] - key).square().sum()) for key in cache.datastore.keys_SD]
            near = sorted(range(40), key=distances.__getitem__)[:k]
            weights = torch.tensor([-distances[i] / temperature for i in near], dtype=torch.float64).softmax(0)
            want = 0.65 * text.model[row, t]
            for i, weight in zip(near, weights, strict=True):
                want[cache.datastore.values_S[i]] += 0.35 * weight
            torch.testing.assert_close(found[row, t], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [2**27, 4 * D * 70, 4 * D])
@pytest.mark.parametrize("k", [1, 33])
def test_chunks_find_what_all_distances_say(k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, queries = Datastore(torch.randn(500, D), torch.zeros(500)), torch.randn(9, D)
    monkeypatch.setattr(knn_lm, "CHUNK", chunk)
    distances, places = store.nearest(queries, k)
    want = all_distances(store, queries).topk(k, largest=False)
    torch.testing.assert_close(distances.double(), want.values, rtol=1e-5, atol=1e-6)
    assert torch.equal(places, want.indices)


def test_distances_are_exact_and_reading_changes_nothing() -> None:
    """Norms of 2,000 and distances of about 10: a difference of squares would be rounded to .5 in float32."""
    store, queries = Datastore(torch.randn(500, D) + 1000, torch.zeros(500)), torch.randn(4, D) + 1000
    distances, places = store.nearest(queries, 20)
    exact = all_distances(store, queries).gather(1, places)
    torch.testing.assert_close(distances.double(), exact, rtol=1e-6, atol=0)
    text = Text()
    cache = knn(text, k=5)
    before, state = cache(text.logits, text.h, text.next)
    text.next = (text.next + 1) % V
    assert state == () and torch.equal(cache(text.logits, text.h, text.next).log_probabilities, before)


def all_distances(store: Datastore, q_QD: Tensor) -> Tensor:
    return (q_QD[:, None].double() - store.keys_SD.double()).square().sum(-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NeuralCache(0), "size=0 must be at least 1"),
        (lambda: NeuralCache(theta=-1.0), "theta=-1.0 must be a number from 0 on"),
        (lambda: NeuralCache(lambda_=1.5), r"lambda=1.5 must lie in \[0, 1\]"),
        (lambda: knn(Text(), k=0), "k=0 must be at least 1"),
        (lambda: knn(Text(), temperature=0.0), "temperature=0.0 must be above 0"),
        (lambda: Datastore(torch.zeros(0, 3), torch.zeros(0)), r"keys of shape \(0, 3\) .* one entry at least"),
        (lambda: knn(Text()).datastore.nearest(torch.zeros(1, 3), 1), "width 3 meet keys of width 5"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    refuses(message, make)


def test_segments_that_do_not_fit_are_refused() -> None:
    text, cache = Text(), NeuralCache(4)
    refuses(r"hidden states of shape \(2, 22, 5\) must be", cache, text.logits, text.h[:, 1:], text.next)
    refuses(r"-100.*11", cache, text.logits, text.h, text.next + 9)
    refuses("must have the shape of the logits", cache, text.logits, text.h, text.next[:, 1:])


def keep(read: list[Tensor], _: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
    read.append(given[0])


@pytest.mark.parametrize("memory", [None, "transformer_xl", "feedback"])
def test_hidden_states_of_our_models_are_what_head_and_feed_forward_read(memory: Any) -> None:
    model = language_model(memory)
    ids, state = torch.randint(0, V, (B, 6)), None
    for _ in range(2):
        read: list[Tensor] = []
        block = model.stack.blocks[-1].feed_forward
        handle = block.enter.register_forward_pre_hook(partial(keep, read))
        with torch.no_grad(), hidden_states(model) as last, hidden_states(model, "feed_forward") as fed:
            out = model(ids, state)
            h, f = last.take(), fed.take()
        handle.remove()
        torch.testing.assert_close(model.answer(h), out.outputs, rtol=0, atol=0)
        torch.testing.assert_close(torch.cat(read, 1), f, rtol=0, atol=0)
        state = out.state
    assert not model.stack._forward_hooks and not block.norm._forward_hooks


def language_model(memory: Any = None, **options: Any) -> Any:
    sizes = {"width": 8, "depth": 2, "heads": 2, "feed_forward": 8}
    return create_model("language_model", vocabulary=V, memory=memory, **sizes, **options).eval()


def test_hidden_states_of_an_adaptive_model_that_is_asked_for_losses() -> None:
    model = language_model(cutoffs=[5])
    ids = torch.randint(0, V, (B, 6))
    with torch.no_grad(), hidden_states(model) as seen:
        losses = model(ids, targets=ids).outputs
        torch.testing.assert_close(model.answer(seen.take(), ids), losses)


def test_hidden_states_of_a_decoder_of_transformers() -> None:
    transformers = library("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=V)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, V, (B, 12))
    with torch.no_grad(), hidden_states(model) as seen:
        shown = model(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(seen.take(), shown)
    refuses("key='feed_forward'", hidden_states(model, "feed_forward").__enter__)


def test_what_has_no_such_hidden_states_is_refused() -> None:
    model, ids = language_model(), torch.randint(0, V, (B, 6))
    refuses(r"key='middle'.*last_hidden.*feed_forward", hidden_states(model, "middle").__enter__)
    refuses("key='last_hidden'", hidden_states(torch.nn.Linear(2, 2)).__enter__)
    with hidden_states(model) as seen, pytest.raises(ValueError, match="was not called since"):
        seen.take()
    with_tokens = language_model("rmt")
    with hidden_states(with_tokens, "feed_forward") as seen:
        with_tokens(ids)
        refuses("key='last_hidden'", seen.take, 6)
    model.stack.blocks[-1].feed_forward = torch.nn.Linear(8, 8)
    refuses("key='last_hidden'", hidden_states(model, "feed_forward").__enter__)
