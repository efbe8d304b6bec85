"""Drill: several threads call one model with a memory; each call gives the result that it gives by itself.

A case is `seed/number`: a host, a memory, and two to four threads with calls of their own, which change every few
instructions: forwards of other rows and states, `generate` of the host and of this package, and training steps, whose
gradients are compared, with activation checkpointing only beside calls that leave the mode. Images and encoders have a
shared cache, which training would change, and are in evaluation mode.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from .frame import Failure

DECODERS = ("gpt2", "llama")
STREAMS = ("grc_stream", "memorizing", "rmt", "armt", "transformer_xl", "compressive")
FIXED = ("BERT_SDPA", "HF_VIT", "VIT", "ENCODER", "MHA")
OWN = {"vocabulary": 24, "width": 16, "heads": 2, "depth": 2}
ROUNDS = 2
Call = Callable[[], list[Tensor]]


def prepare(shared: Path) -> None:
    """Import the libraries, and build one model of each."""
    from integrations import families, hosts

    torch.set_num_threads(1)
    for family in families.DECODERS:
        if family.name in DECODERS:
            family.build()
    for name in FIXED:
        getattr(hosts, name).build()


def attempt(case: str, folder: Path) -> None:
    """Draw a model and its calls; compare them on threads with each by itself."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # renews the pool after the fork, which torch does not do safely on several threads
    rng = Random(case)
    said, model, calls = rng.choice([decoder, decoder, fixed, own])(rng)
    model.train(rng.random() < 0.5 and said[-1] != "shared")
    modes = [module.training for module in model.modules()]
    flags = ("activation_checkpointing", "gradient_checkpointing")
    if model.training and any(getattr(module, flag, False) for module in model.modules() for flag in flags):
        left_out = rng.choice(["our", "training"])  # torch refuses a recomputation in another mode than its forward's
        calls = [call for call in calls if not call[0].startswith(left_out)]
    switching = [call for call in calls if call[0].startswith("our")]  # these change the mode
    chosen = rng.choices(switching if switching and rng.random() < 0.4 else calls, k=rng.randint(2, 4))
    expected = [[call() for _ in range(ROUNDS)] for _, call in chosen]
    found: list[Any] = [None] * len(chosen)
    barrier = threading.Barrier(len(chosen))

    def run(number: int) -> None:
        barrier.wait(30)
        try:
            found[number] = [chosen[number][1]() for _ in range(ROUNDS)]
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(chosen))]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(0.005)
    names = [name for name, _ in chosen]
    for (name, _), results, right in zip(chosen, found, expected, strict=True):
        if not isinstance(results, list):
            raise Failure(f"{said}, {names}: expected a result of {name}, found {results!r}") from results
        for one, other in zip(chain(*results), chain(*right), strict=True):
            if one.shape != other.shape or not torch.allclose(one.double(), other.double(), 1e-5, 1e-6):
                raise Failure(f"{said}, {names}: expected of {name} {other}, found {one}")
    if [module.training for module in model.modules()] != modes:
        raise Failure(f"{said}, {names}: expected the modes before, found {[m.training for m in model.modules()]}")


def decoder(rng: Random) -> tuple[Any, nn.Module, list[tuple[str, Call]]]:
    """A decoder of transformers: forwards with states, `generate` in two ways, and training."""
    from integrations import families, family_checks
    from integrations.transformers_hosts import awaken

    family = rng.choice([family for family in families.DECODERS if family.name in DECODERS])
    memory = rng.choice(STREAMS[: 4 if family.name == "gpt2" else None])  # the others need rotary positions
    model = awaken(family.with_memory(family_checks.STREAMS[memory], segment_length=rng.choice([2, 5])))
    if rng.random() < 0.5:
        model.gradient_checkpointing_enable()
    calls = language_calls(rng, model, families.VOCABULARY)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    for seed in range(3):
        ids = words(seed, families.VOCABULARY)
        with torch.no_grad():
            given = {"memory_state": model(ids[:, :4]).memory_state if seed else None}
        call: dict[str, Any] = {**given, "attention_mask": torch.ones_like(ids), "use_cache": seed != 1, **options}
        calls += [
            (f"forward {seed}", no_grad(lambda i=ids, g=given: [model(i, **g).logits])),
            (f"generate {seed}", lambda i=ids, c=call: [model.generate(i, **c)]),
            (f"training {seed}", lambda i=ids, g=given: gradients(model, model(i, labels=i, **g).loss)),
        ]
    return (family.name, memory), model, calls


def own(rng: Random) -> tuple[Any, nn.Module, list[tuple[str, Call]]]:
    """A language model of this package."""
    from cached_transformers import create_model

    memory = rng.choice(["grc_stream", "transformer_xl", "rmt", "compressive"])
    torch.manual_seed(0)
    model: Any = create_model("language_model", memory={"name": memory, "length": 4}, **OWN)
    if rng.random() < 0.5:
        model.set_activation_checkpointing()
    calls = language_calls(rng, model, OWN["vocabulary"])
    for seed in range(3):
        ids = words(seed, OWN["vocabulary"])
        state = model.init_state(len(ids))
        calls += [(f"forward {seed}", no_grad(lambda i=ids, s=state: [model(i, s).outputs]))]
        calls += [(f"training {seed}", lambda i=ids, s=state: gradients(model, model(i, s).outputs.square().mean()))]
    return ("language_model", memory), model, calls


def language_calls(rng: Random, model: Any, vocabulary: int) -> list[tuple[str, Call]]:
    """This package's `generate`."""
    from cached_transformers.models.generation import generate

    options: dict[str, Any] = {"tokens": 5, "segment_length": 3, **rng.choice([{"temperature": 0}, {"beams": 2}])}

    def call(seed: int) -> Call:
        return lambda: [generate(model, words(seed, vocabulary), **options).tokens]

    return [(f"our generate {seed}", call(seed)) for seed in range(2)]


def fixed(rng: Random) -> tuple[Any, nn.Module, list[tuple[str, Call]]]:
    """An image model or an encoder with a shared cache, perhaps with another attention, in evaluation mode."""
    from integrations import hosts

    from cached_transformers import replace_attention

    host = getattr(hosts, rng.choice(FIXED))
    kind = rng.choice(["grc", "attention_cache"]) if host.name != "mha" else "grc"
    model = host.with_memory(kind)
    model.train()
    host.run(model, host.given(7))  # fills the cache
    model.eval()
    attention = rng.random() < 0.3 and host.name in ("vit", "encoder")
    if attention:
        model = replace_attention(model, "linear").eval()
    calls: list[tuple[str, Call]] = []
    for seed in range(3):
        run = partial(lambda given: host.output(model(**given)), host.given(seed))
        calls += [(f"forward {seed}", no_grad(lambda run=run: [run()]))]
        calls += [(f"backward {seed}", lambda run=run: gradients(model, run().square().mean()))]
    return (host.name, kind, attention, "shared"), model, calls


def words(seed: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (1 + seed % 3, 9), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Gradients that no other thread adds to."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(grad for grad in found if grad is not None)]


def no_grad(call: Call) -> Call:
    return torch.no_grad()(call)


SUMMARY = (
    "two to four threads that change every few instructions call one model: decoders, encoders and image models of "
    "transformers, timm, torch.nn and this package, forwards with states, `generate` and training with checkpointing: "
    "the result of each call by itself, and the mode of before"
)
COUNT, SAMPLE = 150, 6
