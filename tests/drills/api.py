"""Drill: calls of the library with right, odd and wrong options and inputs.

A case is `seed/number`, 25 calls in one process; `seed/number/place` is one of them. A call ends with finite results of
the documented shape, or with a ValueError or TypeError that names the option or its value.
"""

from __future__ import annotations

import inspect
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
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
from .frame import Drill, Failure

TOGETHER = 25
"""Calls of a case."""
SECONDS = 20
ROOM = 1 << 30
"""Bytes that a case may take beyond what the process has when it begins."""
V, D, H, N = 11, 8, 2, 6
ODD: list[Any] = [
    0,
    -1,
    -3,
    2.5,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e30,
    True,
    False,
    "3",
    "",
    "x",
    None,
    [],
    {},
]
ODD += [(1, 2), (), [None], 10**12, 10**30, object(), torch.tensor(2), torch.tensor([1.5, 2]), torch.tensor(0.5)]
ODD += [np.int64(3), np.float32(0.5), np.bool_(True), np.float64("nan"), torch.tensor(2, device="meta"), {"name": "x"}]
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
FACTS = {"length": N, "size": (2, 3), "prefix": 0, "depth": 2, "index": 0, "causal": False, "norm": "pre"}


class Call(NamedTuple):
    """A call, the options that it varies, and the words of which an error must have one."""

    told: str
    run: Callable[[], Any]
    words: list[str]
    extreme: bool = False


class Odd(NamedTuple):
    """Options, of which some are odd."""

    options: dict[str, Any]
    varied: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.varied}"

    @property
    def words(self) -> list[str]:
        """Names and values of the varied options."""
        return [
            w for name, value in self.varied.items() for w in (name, name.rstrip("s"), repr(value), str(value)) if w
        ]

    @property
    def extreme(self) -> bool:
        """True if numbers may overflow."""
        return any(isinstance(v, float) and abs(v) > 100 for v in self.varied.values())


def cases(count: int, seed: int) -> Iterator[str]:
    """Names of `count` cases."""
    return (f"{seed}/{number}" for number in range(count))


def prepare(shared: Path) -> None:
    """Import what calls may reach."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS:
            ct.create_model(name, **MODELS[name])
        for name in HOSTS:
            HOSTS[name]()


def attempt(case: str, folder: Path) -> None:
    """Make the calls of a case."""
    seed, number, *place = case.split("/")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (held, held))
    signal.signal(signal.SIGPROF, _too_long)
    warnings.simplefilter("ignore")
    problems = []
    for one in map(int, place) if place else range(TOGETHER):
        name = f"{seed}/{number}/{one}"
        random = Random(name)
        torch.manual_seed(one)
        call = random.choice(KINDS)(random)
        print(name, call.told, flush=True)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        problem = tried(call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if problem:
            problems.append(f"--case '{name}'\n{call.told}\n{problem}")
    if problems:
        raise Failure("\n\n".join(problems))


def _too_long(number: int, frame: object) -> None:
    raise BaseException(f"took longer than {SECONDS} seconds")


def tried(call: Call) -> str | None:
    """Make a call; return a description of a wrong ending, or None."""
    try:
        result = call.run()
    except (ValueError, TypeError) as error:
        told = "".join(traceback.format_exception(error)[-3:])
        return (
            None
            if any(word in str(error) for word in call.words if word)
            else f"a message without {call.words}: {told}"
        )
    except (RuntimeError, NotImplementedError) as error:  # of another device: torch's own message names it
        return None if "meta" in str(error) else traceback.format_exc()[-1200:]
    except BaseException:
        return traceback.format_exc()[-1200:]
    numbers = [] if "meta" in call.told else [t for t in _tensors(result) if t.is_floating_point() and not t.is_meta]
    if not call.extreme and not all(bool(t.isfinite().all()) for t in numbers):
        return "results that are not finite"
    return None


def _tensors(result: Any) -> Iterator[Tensor]:
    """Outputs; a state may hold infinities."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict | list):
        for item in result.values() if isinstance(result, dict) else result:
            yield from _tensors(item)


def odd(random: Random, factory: Any, needed: dict[str, Any] | None = None, skip: tuple[str, ...] = ()) -> Odd:
    """Options of a factory, one or two of them varied: fitting, or odd."""
    hints, options = hints_of(factory), dict(needed or {})
    known = [name for name in inspect.signature(factory).parameters if name not in skip and name in hints]
    known = [name for name in known if name not in ("self", "options", "grc", "others", "pretrained")]
    varied = {}
    for name in random.sample(known, min(len(known), random.choice([0, 1, 1, 1, 2]))):
        if random.random() < 0.4:
            value = fitting(hints[name], random, words_of(factory), ["x"])
            if isinstance(value, int) and not isinstance(value, bool) and value > 64:
                value = 3
        else:
            value = random.choice(ODD)
        varied[name] = value
    return Odd(options | varied, varied)


def tokens(random: Random, rows: int = 2, wrong: float = 0.5) -> tuple[Any, bool]:
    """Token ids, or with probability `wrong` anything else; and whether they are right."""
    right = torch.randint(0, V, (rows, N), generator=torch.Generator().manual_seed(random.randrange(99)))
    if random.random() >= wrong:
        return right, True
    others = [right[:, :0], right[:0], right.float(), right + V, right - V, right[0], right[None], right.tolist(), None]
    others += [
        right.numpy(),
        right.to("meta"),
        right.bool(),
        right.to(torch.int8),
        right[0, 0],
        "text",
    ]
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
    registry = random.choice([ct.MEMORIES, ct.ATTENTIONS])
    entry: Registration[Any] = random.choice(list(registry))
    facts = {key: value for key, value in FACTS.items() if key in entry.options and key != "length"}
    needed = {"width": D, "heads": H, "length": N, "buckets": 4}
    given = odd(
        random,
        entry.factory,
        facts
        | {key: needed[key] for key in needed if required(entry, key) or (key == "buckets" and key in entry.options)},
        ("facts",),
    )
    return Call(f"{entry.name} {given}", lambda: entry.factory(**given.options), [*given.words, *entry.options])


def required(entry: Registration[Any], key: str) -> bool:
    """True if a part has an option without default."""
    return key in entry.options and entry.options[key].default is inspect.Parameter.empty


def model_of(random: Random) -> Call:
    """A model, built and called."""
    name = random.choice([*MODELS, *MEMORY_MODELS])
    given = odd(random, ct.MODELS.entry(name).factory, MODELS[name])
    inputs, right = inputs_of(random, name)
    words = given.words + ([] if right else INPUTS)
    return Call(
        f"{name} {given} {told(inputs)}",
        lambda: logits_of(ct.create_model(name, **given.options), inputs),
        words + (["padding"] if not right else []),
        given.extreme,
    )


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

    return Call(f"{name} {entry.name} {given}", run, [*given.words, *entry.options, entry.name, kind], given.extreme)


def host(random: Random) -> Call:
    """`add_memory` or `replace_attention` on a host, which then reads."""
    name = random.choice(list(HOSTS))
    change, registry = random.choice([(ct.add_memory, ct.MEMORIES), (ct.replace_attention, ct.ATTENTIONS)])
    entry = random.choice(list(registry))
    given = odd(random, entry.factory, {}, registry.given)
    rows, length = random.choice([(2, N), (2, N), (2, N), (0, N), (2, 0)])
    inputs = HOST_INPUTS[name](rows, length)
    lengths = (
        {"segment_length": random.choice([4, 4, None, *ODD])} if change is ct.add_memory and name == "gpt2" else {}
    )

    def run() -> Any:
        model = HOSTS[name]()
        change(model, entry.name, **given.options, **lengths)
        try:
            return logits_of(model.eval(), inputs)
        except (RuntimeError, ValueError):
            if (rows and length) or fails_alone(name, inputs) is None:
                raise
            return None

    words = [*given.words, *entry.options, entry.name, entry.factory.__name__, *lengths, "GPT2", "VisionTransformer"]
    words += INPUTS if 0 in (rows, length) else []
    return Call(f"{change.__name__} {name} {entry.name} {given} {lengths} {rows, length}", run, words, given.extreme)


def fails_alone(name: str, inputs: Tensor) -> Exception | None:
    """The error of a host without memory."""
    try:
        HOSTS[name]().eval()(inputs)
    except (RuntimeError, ValueError) as error:
        return error
    return None


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

    words = [*given.words, *extra, *([] if right and also else INPUTS), *(["passes"] if memory is None else [])]
    return Call(f"{kind.__name__} {memory} {given} {told(inputs)} {told(targets)} {list(extra)}", run, words)


def text(random: Random) -> Call:
    """Generation, a session, or a stream."""
    memory = random.choice([None, "grc_stream", {"name": "transformer_xl", "length": 4}])
    prompt, right = tokens(random, random.choice([1, 2]))
    given = odd(random, Choice, {"tokens": 3}, ("generator",))
    lengths = {"segment_length": random.choice([4, 4, 4, *ODD])}
    pieces = random.choice(
        [[[1, 2, 3, 4, 5, 6], [7]], [], [[]], [[1.5, 2.0]], [[1], [99]], None, 3, [3], prompt, [None]]
    )
    kind = random.choice(["generate", "session", "stream", "stream"])

    def run() -> Any:
        model = ct.create_model("language_model", **SIZES, memory=memory)
        if kind == "generate":
            return list(ct.generate(model, prompt, **lengths, **given.options)[2:])
        if kind == "stream":
            return [torch.tensor(progress.nats) for progress in ct.read_stream(model, pieces, **lengths)]
        session = ct.Session(model, **lengths)
        session.read(prompt)
        return session.generate(**given.options).scores

    words = [*lengths, *(given.words if kind != "stream" else []), *([] if right and kind != "stream" else INPUTS)]
    words += ["session", "read"] if kind == "session" else []
    return Call(f"{kind} {memory} {given} {lengths} {told(pieces if kind == 'stream' else prompt)}", run, words)


def small(random: Random) -> Call:
    """A function or class with options."""
    factory, needed = random.choice(SMALL_PARTS)
    given = odd(random, factory, needed)

    def run() -> Any:
        made = factory(**given.options)
        if isinstance(made, ct.GRCAttention | SwitchFeedForward):
            return made(torch.rand(2, N, given.options["width"]))[0]
        return list(made)[:3] if isinstance(made, ct.Curriculum) else None

    return Call(f"{factory.__name__} {given}", run, [*given.words, "size"], given.extreme)


def resized(length: int, size: tuple[int, int] | None = None) -> Any:
    """A model whose caches are resized, called."""
    model = ct.add_memory(HOSTS["torch"](), "grc", length=4)
    ct.resize_caches(model, length, size)
    return logits_of(model, torch.rand(2, N, D))


def told(value: Any) -> str:
    """A short description of inputs."""
    return f"{tuple(value.shape)} {value.dtype} {value.device}" if isinstance(value, Tensor) else repr(value)[:60]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=H, n_positions=32, attn_pdrop=0.0))


INPUTS = ["inputs", "tokens", "token id", "prompt", "images", "pieces", "a target", "targets", "padding", "rows", "row"]
IMAGES = {"vision_transformer": 8, "timm": 32}
MEMORY_MODELS = ["language_model", "sequence_classifier", "vision_transformer"]
HOSTS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "timm": lambda: ct.create_model("timm", **MODELS["timm"]).model,  # type: ignore[union-attr, return-value]
    "torch": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 8, 0.0, batch_first=True), 1),
}
HOST_INPUTS: dict[str, Callable[[int, int], Tensor]] = {
    "gpt2": lambda rows, length: torch.ones(rows, length, dtype=torch.long),
    "timm": lambda rows, length: torch.rand(rows, 3, 32, 32),
    "torch": lambda rows, length: torch.rand(rows, length, D),
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

DRILL = Drill(
    "api",
    f"{TOGETHER} calls a case of every registered memory, attention and model, and of hosts, loops, generation, "
    "sessions, streams and positions, with right, odd and wrong options and inputs, empty ones too: finite results of "
    f"the documented shape, or a ValueError or TypeError that names the option, within {SECONDS} seconds and 1 GiB",
    cases,
    attempt,
    count=80,
    sample=2,
    prepare=prepare,
    limit=300.0,
)
