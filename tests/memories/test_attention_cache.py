"""The attention-based cache: a slow twin, limiting cases, hosts of other libraries, refusals, and that it remembers.

The rules of a shared cache (commit, recomputation, evaluation, saving, folding) are tested in tests/grc for every kind.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from grc.test_twin import attend
from integrations.hosts import Host, close_gates, hosts, stored, train
from memories.harness import DOUBLE, HEADS, WIDTH, agree
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import create_model, remove_memory
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.attention_cache import AttendedCache, AttentionCache

ROWS, LENGTH = 2, 3
STORE: dict[str, Any] = {"update": "store"}


def make_layer(**options: Any) -> Any:
    layer = SelfAttention(WIDTH, HEADS, memory=AttentionCache(WIDTH, HEADS, LENGTH, **options)).double()
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.5)
    return layer


def new_cache(cache: AttendedCache, s_MC: Tensor, known_MC: Tensor) -> Tensor:
    """One row's update, slot by slot and head by head."""
    sources = [*known_MC, *s_MC]
    out = []
    for slot in range(len(s_MC)):
        query = cache.query.weight @ s_MC[slot] + cache.query.bias + cache.query_cache.weight @ known_MC[slot]
        heads = []
        for h in range(HEADS):
            pairs = [(cache.key_value.weight @ x + cache.key_value.bias).chunk(2) for x in sources]
            keys, values = ([part.view(HEADS, -1)[h] for part in parts] for parts in zip(*pairs, strict=True))
            heads.append(attend(query.view(HEADS, -1)[h], keys, values))
        z_C = known_MC[slot] + cache.output.weight @ torch.cat(heads) + cache.output.bias
        scale = torch.sqrt(((z_C - z_C.mean()) ** 2).mean() + cache.norm.eps)
        out.append((z_C - z_C.mean()) / scale * cache.norm.weight + cache.norm.bias)
    return torch.stack(out)


def twin(layer: Any, x_BND: Tensor, known_MC: Tensor, update: str, attend_: str) -> tuple[Tensor, Tensor]:
    """Output of one training step, and the cache after it."""
    memory, c = layer.memory, known_MC.shape[1]
    slots = [x_ND[[i * len(x_ND) // LENGTH for i in range(LENGTH)], :c] for x_ND in x_BND]
    rows = [s_MC if update == "store" else new_cache(memory.cache, s_MC, known_MC) for s_MC in slots]
    mean_MC = sum(rows) / len(rows)
    out = []
    for x_ND, own_MC in zip(x_BND, rows, strict=True):
        read_MC = known_MC if update == "store" else mean_MC if attend_ == "mean" else own_MC
        qkv = [layer.qkv(x_D).chunk(3) for x_D in x_ND]
        pairs = [(memory.branch.key_value(s_C)[:c], memory.branch.key_value(s_C)[c:]) for s_C in read_MC]
        said = []
        for t, x_D in enumerate(x_ND):
            merged = []
            for h in range(HEADS):
                own = [[part.view(HEADS, -1)[h] for part in token] for token in qkv]
                y = attend(own[t][0], [o[1] for o in own], [o[2] for o in own])
                q = memory.branch.query(x_D[:c]).view(HEADS, -1)[h]
                o = attend(q, *([p[i].view(HEADS, -1)[h] for p in pairs] for i in (0, 1)))
                ratio = torch.sigmoid(memory.branch.gate_H[h])
                merged.append(ratio * torch.cat([o, o.new_zeros(len(y) - len(o))]) + (1 - ratio) * y)
            said.append(layer.output(torch.cat(merged)))
        out.append(torch.stack(said))
    return torch.stack(out), mean_MC


@pytest.mark.parametrize("tokens", [LENGTH, 4])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize(("update", "attend_"), [("attention", "mean"), ("attention", "sample"), ("store", "mean")])
def test_two_training_steps_and_all_gradients(update: str, attend_: str, ratio: float, tokens: int) -> None:
    layer = make_layer(update=update, attend=attend_, ratio=ratio)
    known_MC = torch.zeros(LENGTH, int(ratio * WIDTH), **DOUBLE)
    for step in range(2):  # the second step starts from a cache that holds something
        x_BND = torch.randn(ROWS, tokens, WIDTH, **DOUBLE, requires_grad=True)
        expected, new_MC = twin(layer, x_BND, known_MC, update, attend_)
        leaves = {"x": x_BND, **dict(layer.named_parameters())}
        agree([layer(x_BND).y_BND], [expected], leaves, least=1e-9 if step else None)
        layer.memory.cache.commit()
        known_MC = new_MC.detach()
        torch.testing.assert_close(layer.memory.cache.cache_MC, known_MC, rtol=0, atol=1e-10)


def after_steps(seed: int, steps: int, scale: float) -> Tensor:
    """The cache after some steps, of which only the first depends on the seed."""
    torch.manual_seed(0)
    layer = make_layer()
    nn.init.ones_(layer.memory.cache.norm.weight), nn.init.zeros_(layer.memory.cache.norm.bias)
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed if step == 0 else 100 + step)
        layer(scale * torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator))
    layer.memory.cache.commit()
    return layer.memory.cache.cache_MC  # type: ignore[no-any-return]


def test_the_cache_stays_bounded_and_forgets_by_and_by() -> None:
    assert after_steps(1, 10, scale=1e3).abs().max() <= math.sqrt(WIDTH // 2)
    early, late = ((after_steps(1, steps, 1.0) - after_steps(2, steps, 1.0)).abs().max() for steps in (3, 9))
    assert early > 1e-2 and early > 3 * late > 0


@hosts()
@pytest.mark.parametrize("options", [{}, STORE], ids=["attention", "store"])
def test_hosts_of_grc_are_hosts_of_this_cache(host: Host, options: dict[str, Any]) -> None:
    plain, model = host.build(), host.with_memory("attention_cache", **options)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(host, model, 3)
    still = [name for name, p in model.named_parameters() if "memory." in name and torch.equal(p, weights[name])]
    assert not still and all(cache.abs().max() > 0.01 for cache in stored(model))
    given = host.given(1)
    model.eval()
    with torch.no_grad():
        before = stored(model)
        first = host.run(model, given)
        assert torch.equal(host.run(model, given), first)
        assert all(torch.equal(a, b) for a, b in zip(stored(model), before, strict=True))
    host_weights = {k: v for k, v in model.state_dict().items() if ".memory." not in f".{k}"}
    plain.load_state_dict(host_weights)
    expected = host.run(plain.train(), given)
    close_gates(model)
    torch.testing.assert_close(host.run(model.train(), given), expected, rtol=0, atol=1e-6)
    remove_memory(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(host.run(model, given), expected)


# Proof that it remembers: some rows of a batch show a bit, which rows of the next step are asked for.
HIDDEN = 4  # tokens 2 and 3 show the bit, 4 hides it


def batch(bit: int, rows: int, shown: int) -> Tensor:
    """(rows, 2): a token without meaning, and the bit, which all but the first `shown` rows hide."""
    tokens = torch.randint(0, 2, (rows, 2))
    tokens[:, 1] = HIDDEN
    tokens[:shown, 1] = 2 + bit
    return tokens


def right(memory: dict[str, Any] | None, steps: int) -> float:
    """Share of right answers to hidden bits in evaluation, after a step of training that showed them to other rows."""
    sizes = {"vocabulary": 5, "classes": 2, "max_length": 2, "width": 16, "depth": 1, "heads": 2, "feed_forward": 32}
    model = create_model("sequence_classifier", **sizes, memory=memory)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    for _ in range(steps):
        bit = int(torch.randint(0, 2, ()))
        with torch.no_grad():
            model(batch(bit, 16, 8))
        loss = F.cross_entropy(model(batch(bit, 16, 8)).outputs[8:], torch.full((8,), bit))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    answers = []
    for step in range(40):
        bit = step % 2
        with torch.no_grad():
            for _ in range(2):
                model.train()(batch(bit, 16, 8))
            said = model.eval()(batch(bit, 16, 0)).outputs.argmax(-1)
        answers.append((said == bit).double().mean())
    return torch.stack(answers).mean().item()


@pytest.mark.parametrize("options", [{}, STORE], ids=["attention", "store"])
def test_what_training_rows_showed_is_known_in_evaluation(options: dict[str, Any]) -> None:
    assert right({"name": "attention_cache", **options}, 300) > 0.95
    assert right(None, 100) == pytest.approx(0.5, abs=0.05)
