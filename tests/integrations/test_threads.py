"""Several threads call one model: each call has its own context, and the values of a single thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from integrations.families import ALL
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import add_memory, create_model
from cached_transformers.integrations.segment_context import running
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.generation import generate

ROUNDS = 3
NAMED = {family.name: family for family in ALL}


def in_turns(calls: list[Callable[[], Tensor]], modules: list[nn.Module]) -> list[list[Tensor]]:
    """The results of calls that each run on a thread of their own, which change at every module."""
    barrier = threading.Barrier(len(calls))

    def meet(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            barrier.wait(60)

    hooks = [module.register_forward_pre_hook(meet) for module in modules]
    hooks += [module.register_forward_hook(meet) for module in modules]

    def run(call: Callable[[], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [call() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(run, calls))
    for hook in hooks:
        hook.remove()
    return found


def check(model: Any, given: list[Any], call: Callable[[Any], Tensor]) -> None:
    """Both threads are inside of each layer at the same time."""
    modules = [m for m in model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        expected = [call(one) for one in given]
    assert not torch.equal(*expected)
    found = in_turns([lambda one=one: call(one) for one in given], modules)
    for results, alone in zip(found, expected, strict=True):
        assert len(results) == ROUNDS
        for result in results:
            torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
    assert running().segment is None and running().model is None and running().attention is None and not running().aside


@pytest.mark.parametrize("memory", ["transformer_xl", "grc_stream", "rmt"])
def test_a_decoder(memory: str) -> None:
    spec = {"transformer_xl": {"length": 8}}.get(memory, {})
    torch.manual_seed(0)
    model = add_memory(NAMED["llama"].build(), memory, segment_length=4, **spec).eval()
    given = [torch.randint(0, 20, (rows, 12), generator=torch.Generator().manual_seed(rows)) for rows in (2, 2)]
    given[1] = given[1].flip(1)
    check(model, given, lambda ids: model(ids).logits)


@pytest.mark.parametrize("of", ["ours", "a host's"])
def test_generation_on_several_threads_leaves_the_mode(of: str) -> None:
    """The last thread that leaves restores it, whichever entered first."""
    torch.manual_seed(0)
    if of == "ours":
        model: Any = create_model("language_model", vocabulary=20, width=8, heads=2, depth=1, memory="grc_stream")
    else:
        model = add_memory(NAMED["llama"].build(), "grc_stream", segment_length=4)
    model.train()
    part = model.get_submodule(next(name for name, child in model.named_children() if len(list(child.modules())) > 2))
    part.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    inside, leave = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    def run(number: int) -> None:
        def wait(token: Tensor) -> None:
            assert not any(module.training for module in model.modules())
            inside[number].set()
            assert leave[number].wait(60)

        generate(model, torch.ones(1, 2, dtype=torch.long), tokens=1, segment_length=4, each=wait)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(60)
    for number in (0, 2, 1):
        assert not any(module.training for module in model.modules())
        leave[number].set()
        threads[number].join()
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_backward_pass_on_another_thread() -> None:
    """Activation checkpointing runs blocks again with the context of their forward."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model: Any = add_memory(NAMED["gptj"].build(), "grc_stream", segment_length=4).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=ids, labels=ids).loss
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", ["segments", "diagonal"])
def test_no_call_exchanges_the_weights_of_the_model(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would train without them, or put them back after the model's own."""
    memory = {"name": "compressive", "length": 4, "compressed": 4, "rate": 2}
    model: Any = create_model("language_model", memory=memory, vocabulary=20, width=8, heads=2, depth=3)
    loop, ids = SegmentLoop(model, 4, schedule=schedule), torch.randint(0, 20, (2, 24))
    weights, seen, norm = dict(model.named_parameters()), list[bool](), F.layer_norm

    def looked(*given: Any, **named: Any) -> Tensor:
        seen.append(all(now is weights[name] for name, now in model.named_parameters()))
        return norm(*given, **named)

    monkeypatch.setattr(F, "layer_norm", looked)
    loop(ids, ids)
    assert all(seen) and len(seen) > 20
