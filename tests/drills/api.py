"""Drill: calls of the library with right, odd and wrong options and inputs.

A case is `seed/number`, 25 calls in one process; `seed/number/place` is one of them. A call ends with finite results of
the documented shape, or with a ValueError or TypeError that names the option or its value.
"""

from __future__ import annotations

import math
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from integrations.transformers_hosts import GPT2
from torch import Tensor, nn

import cached_transformers as ct
from cached_transformers.annotations import hints_of
from cached_transformers.layers.switch import SwitchFeedForward
from cached_transformers.loops.curriculum import AdaptiveCurriculum
from cached_transformers.models.sampling import Choice
from cached_transformers.models.stack_options import StackOptions
from cached_transformers.positions import make_positions
from cached_transformers.registry import Registration

from ._fuzz_values import fitting, words_of
from .frame import Failure, bound_memory, each

TOGETHER = 25
"""Calls of a case."""
SECONDS = 20
ROOM = 1 << 30
"""Bytes that a case may take beyond what the process has when it begins."""
V, D, H, N = 11, 8, 2, 6
NAN, META = float("nan"), torch.tensor(2, device="meta")
ODD: list[Any] = [0, -1, -3, 2.5, NAN, NAN, math.inf, -math.inf, 1e30, 10**12, 10**30, True, False, "3", "", "x"]
ODD += [None, [], {}, (1, 2), (), [None], {"name": "x"}, object(), torch.tensor([1.5, 2]), torch.tensor(0.5), META]
ODD += [np.int64(3), np.float32(0.5), np.bool_(True), np.float64(NAN), torch.tensor(2)]
SIZES = {"vocabulary": V, "width": D, "depth": 1, "heads": H, "feed_forward": 8}
MODELS: dict[str, dict[str, Any]] = {
    "language_model": SIZES,
    "sequence_classifier": SIZES | {"classes": 3, "max_length": 16},
    "vision_transformer": {key: size for key, size in SIZES.items() if key != "vocabulary"}
    | {"image_size": 8, "patch_size": 4, "classes": 3},
    "encoder_decoder": SIZES | {"max_length": 16},
    "transformers": {"vocabulary": V, "n_embd": D, "n_layer": 1, "n_head": H, "n_positions": 32},
    "timm": {"architecture": "vit_tiny_patch16_224", "classes": 3, "img_size": 32, "embed_dim": 16, "depth": 1}
    | {"num_heads": 2},
}
SMALL = {"depth": 2}
FACTS = {"width": D, "heads": H, "length": N, "size": (2, 3), "prefix": 0, "depth": 2, "index": 0, "buckets": 4}


class Call(NamedTuple):
    """A call, and the words of which an error must have one; `kind`: "right", "huge" (may overflow), or "refused"."""

    told: str
    run: Callable[[], Any]
    words: list[str]
    kind: str


class Odd(NamedTuple):
    """Options, of which some are odd."""

    options: dict[str, Any]
    varied: dict[str, Any]

    def call(self, told: str, run: Callable[[], Any], *words: str) -> Call:
        """A call with these options."""
        named = [
            word for name, value in self.varied.items() for word in (name, name.rstrip("s"), repr(value), str(value))
        ]
        floats = [value for value in self.varied.values() if isinstance(value, float)]
        kind = "refused" if any(map(math.isnan, floats)) else "huge" if any(abs(v) > 100 for v in floats) else "right"
        return Call(f"{told} {self.varied}", run, [word for word in (*named, *words) if word], kind)


def prepare(shared: Path) -> None:
    """Import what calls may reach."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS:
            ct.create_model(name, **MODELS[name])
        GPT2.build()


def attempt(case: str, folder: Path) -> None:
    """Make the calls of a case."""
    bound_memory(ROOM)
    signal.signal(signal.SIGPROF, _too_long)
    warnings.simplefilter("ignore")
    each(case, TOGETHER, _called)


def _called(name: str) -> str | None:
    random = Random(name)
    torch.manual_seed(int(name.rpartition("/")[2]))
    call = random.choice(KINDS)(random)
    print(name, call.told, flush=True)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    problem = tried(call)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return problem and f"{call.told}\n{problem}"


def _too_long(number: int, frame: object) -> None:
    raise BaseException(f"took longer than {SECONDS} seconds")


def tried(call: Call) -> str | None:
    """Make a call; return a description of a wrong ending, or None."""
    try:
        result = call.run()
    except (ValueError, TypeError) as error:
        named = any(word in str(error) for word in call.words)
        return None if named else f"a message without {call.words}: {traceback.format_exc()[-600:]}"
    except BaseException as error:  # of another device: torch's own message names it
        return None if isinstance(error, RuntimeError) and "meta" in str(error) else traceback.format_exc()[-1200:]
    if call.kind == "refused":
        return "not-a-number was accepted"
    results = [t for t in (result if isinstance(result, list) else [result]) if isinstance(t, Tensor)]
    if call.kind == "right" and "meta" not in call.told and not all(bool(t.isfinite().all()) for t in results):
        return "results that are not finite"
    return None


def odd(random: Random, factory: Any, needed: dict[str, Any] | None = None, skip: tuple[str, ...] = ()) -> Odd:
    """Options of a factory, one or two of them varied: fitting, or odd."""
    hints, varied = hints_of(factory), {}
    known = [name for name in hints if name not in (*skip, "self", "options", "grc", "pretrained", "return")]
    known = [name for name in known if factory is not StackOptions or name not in ("memory", "attention", "experts")]
    for name in random.sample(known, min(len(known), random.choice([0, 1, 1, 1, 2]))):
        if random.random() < 0.4:
            value = fitting(hints[name], random, words_of(factory), ["x"])
            varied[name] = 3 if isinstance(value, int) and value > 64 else value
        else:
            varied[name] = random.choice(ODD)
    return Odd((needed or {}) | varied, varied)


def tokens(random: Random, rows: int = 2, wrong: float = 0.5) -> tuple[Any, bool]:
    """Token ids, or with probability `wrong` anything else; and whether they are right."""
    right = torch.randint(0, V, (rows, N), generator=torch.Generator().manual_seed(random.randrange(99)))
    if random.random() >= wrong:
        return right, True
    others = [right[:, :0], right[:0], right.float(), right + V, right - V, right[0], right[None], right.tolist(), None]
    others += [right.numpy(), right.to("meta"), right.bool(), right.to(torch.int8), right[0, 0], "text"]
    return random.choice(others), False


def inputs_of(random: Random, name: str, wrong: float = 0.5) -> tuple[Any, bool]:
    """Inputs of a registered model."""
    if name not in IMAGES:
        return tokens(random, wrong=wrong)
    right = torch.rand(2, 3, IMAGES[name], IMAGES[name])
    if random.random() >= wrong:
        return right, True
    if name == "timm":  # other errors are timm's
        return right[:0], False
    others = [right[:0], right[:, :0], right[:, :1], right[..., :5], right.int(), right[0], None, right.tolist()]
    return random.choice([*others, right.numpy(), right.to("meta"), right[..., :0, :0]]), False


def logits_of(model: nn.Module, inputs: Any) -> Tensor:
    """Logits of a model, one row per row of the inputs."""
    more = (torch.ones(2, 3, dtype=torch.long),) if hasattr(model, "encode") else ()
    out = model(inputs, *more)
    logits: Tensor = out if isinstance(out, Tensor) else getattr(out, "logits", out[0])
    if len(logits) != len(inputs):
        raise Failure(f"outputs of shape {tuple(logits.shape)} for inputs of shape {tuple(inputs.shape)}")
    return logits


def part(random: Random) -> Call:
    """A memory or an attention on its own."""
    entry: Registration[Any] = random.choice([*ct.MEMORIES, *ct.ATTENTIONS])
    needed = {key: FACTS[key] for key in FACTS if key in entry.options}
    given = odd(random, entry.factory, needed, ("facts",))
    return given.call(entry.name, lambda: entry.factory(**given.options), *entry.options)


def model_of(random: Random) -> Call:
    """A model, built and called."""
    name = random.choice([*MODELS, *MEMORY_MODELS])
    given = odd(random, ct.MODELS.entry(name).factory, MODELS[name])
    inputs, right = inputs_of(random, name)
    run = lambda: logits_of(ct.create_model(name, **given.options), inputs)  # noqa: E731
    return given.call(f"{name} {told(inputs)}", run, *([] if right else INPUTS))


def model_with_part(random: Random) -> Call:
    """A model with a memory or an attention of its own options, in a loop where it reads tokens."""
    name = random.choice(MEMORY_MODELS)
    kind, registry = random.choice([("memory", ct.MEMORIES), ("attention", ct.ATTENTIONS)])
    entry = random.choice(list(registry))
    given = odd(random, entry.factory, {}, registry.given)
    inputs, _ = inputs_of(random, name, 0.0)

    def run() -> Any:
        model = ct.create_model(name, **MODELS[name] | SMALL | {kind: {"name": entry.name, **given.options}})
        if name != "language_model":
            return logits_of(model, inputs)
        loss = ct.SegmentLoop(model, 4, bptt=2)(inputs, inputs)[0]
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    return given.call(f"{name} {entry.name}", run, *entry.options, entry.name, kind)


def host(random: Random) -> Call:
    """`add_memory` or `replace_attention` on a host, which then reads."""
    name = random.choice(list(HOSTS))
    change, registry = random.choice([(ct.add_memory, ct.MEMORIES), (ct.replace_attention, ct.ATTENTIONS)])
    entry = random.choice(list(registry))
    given = odd(random, entry.factory, {}, registry.given)
    rows, length = random.choice([(2, N), (2, N), (2, N), (0, N), (2, 0)])
    make, inputs = HOSTS[name][0], HOSTS[name][1](rows, length)
    alone = tried(Call("", lambda: make().eval()(inputs), [], "huge")) if 0 in (rows, length) else None
    reads = change is ct.add_memory and name == "gpt2"
    lengths = {"segment_length": random.choice([4, 4, None, *ODD])} if reads else {}

    def run() -> Any:
        model = change(make(), entry.name, **given.options, **lengths)
        return logits_of(model.eval(), inputs) if alone is None else None

    words = [*entry.options, entry.name, entry.factory.__name__, *lengths, "GPT2", "VisionTransformer"]
    words += INPUTS if 0 in (rows, length) else []
    return given.call(f"{change.__name__} {name} {entry.name} {lengths} {rows, length}", run, *words)


def loop(random: Random) -> Call:
    """A loop over segments, with odd options or odd inputs."""
    kind = random.choice([ct.SegmentLoop, ct.ReplayLoop])
    memory = random.choice([None, "grc_stream", {"name": "transformer_xl", "length": 4}, {"name": "rmt", "length": 2}])
    given = odd(random, kind, {"segment_length": 4}, ("model",))
    (inputs, right), (targets, also) = tokens(random), tokens(random)
    more = {"padding": targets, "reset": targets[:, 0] if also else targets, "documents": targets}
    extra = {name: value for name, value in more.items() if random.random() < 0.1}

    def run() -> Any:
        loss = kind(ct.create_model("language_model", **SIZES | SMALL, memory=memory), **given.options)
        found, _ = loss(inputs, targets, **extra)
        found.backward()
        return found

    words = [*extra, *([] if right and also else INPUTS)]
    return given.call(f"{kind.__name__} {memory} {told(inputs)} {told(targets)} {list(extra)}", run, *words)


def text(random: Random) -> Call:
    """Generation, a session, or a stream."""
    memory = random.choice([None, "grc_stream", {"name": "transformer_xl", "length": 4}])
    prompt, right = tokens(random, random.choice([1, 2]))
    kind = random.choice(["generate", "session", "stream", "stream"])
    given = odd(random, Choice, {"tokens": 3}, ("generator",)) if kind != "stream" else Odd({}, {})
    lengths = {"segment_length": random.choice([4, 4, 4, *ODD])}
    pieces = random.choice([[[1, 2, 3, 4], [7]], [], [[]], [[1.5, 2.0]], [[1], [99]], None, 3, [3], prompt, [None]])

    def run() -> Any:
        model = ct.create_model("language_model", **SIZES, memory=memory)
        if kind == "generate":
            return list(ct.generate(model, prompt, **lengths, **given.options)[2:])
        if kind == "stream":
            return [torch.tensor(progress.nats) for progress in ct.read_stream(model, pieces, **lengths)]
        session = ct.Session(model, **lengths)
        session.read(prompt)
        return session.generate(**given.options).scores

    words = [
        *lengths,
        *([] if right and kind != "stream" else INPUTS),
        *(["session", "read"] if kind == "session" else []),
    ]
    return given.call(f"{kind} {memory} {lengths} {told(pieces if kind == 'stream' else prompt)}", run, *words)


def small(random: Random) -> Call:
    """A function or class with options."""
    factory, needed = random.choice(SMALL_PARTS)
    given = odd(random, factory, needed)

    def run() -> Any:
        made = factory(**given.options)
        if isinstance(made, ct.GRCAttention | SwitchFeedForward):
            return made(torch.rand(2, N, given.options["width"]))[0]
        return list(made)[:3] if isinstance(made, ct.Curriculum) else None

    return given.call(factory.__name__, run, "size")


def resized(length: int, size: tuple[int, int] | None = None) -> Any:
    """A model whose caches are resized, called."""
    model = ct.add_memory(HOSTS["torch"][0](), "grc", length=4)
    ct.resize_caches(model, length, size)
    return logits_of(model, torch.rand(2, N, D))


def told(value: Any) -> str:
    """A short description of inputs."""
    return f"{tuple(value.shape)} {value.dtype} {value.device}" if isinstance(value, Tensor) else repr(value)[:60]


INPUTS = ["inputs", "tokens", "token id", "prompt", "images", "pieces", "a target", "targets", "padding", "rows", "row"]
IMAGES = {"vision_transformer": 8, "timm": 32}
MEMORY_MODELS = ["language_model", "sequence_classifier", "vision_transformer"]
HOSTS: dict[str, tuple[Callable[[], Any], Callable[[int, int], Tensor]]] = {
    "gpt2": (GPT2.build, lambda rows, length: torch.ones(rows, length, dtype=torch.long)),
    "timm": (lambda: ct.create_model("timm", **MODELS["timm"]).model, lambda rows, _: torch.rand(rows, 3, 32, 32)),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 8, 0.0, batch_first=True), 1),
        lambda rows, length: torch.rand(rows, length, D),
    ),
}
SMALL_PARTS: list[tuple[Any, dict[str, Any]]] = [
    (make_positions, {"name": "rotary", "width": D, "heads": H, "length": N}),
    (Choice, {"tokens": 3}),
    (StackOptions, {"width": D, "depth": 1, "heads": H, "feed_forward": 8}),
    (ct.Curriculum, {"stages": [1, 2], "steps_each": 3}),
    (AdaptiveCurriculum, {"stages": [1, 2], "solved": 0.5}),
    (ct.GRCAttention, {"width": D, "heads": H, "length": N}),
    (ct.GatedRecurrentCache, {"width": D, "length": N}),
    (SwitchFeedForward, {"width": D, "hidden": 8, "experts": 2}),
    (resized, {"length": 3}),
]
KINDS = [part, part, model_of, model_of, model_with_part, model_with_part, host, loop, text, small]

SUMMARY = (
    f"{TOGETHER} calls a case of all public parts, with right, odd and wrong options and inputs: finite results of "
    f"the documented shape, or a ValueError or TypeError that names the option, within {SECONDS} seconds and 1 GiB"
)
COUNT, SAMPLE, LIMIT = 80, 2, 300.0
