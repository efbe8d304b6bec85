"""Drill: the state of one model is given to another, or damaged.

A case `ours/label/seed` is a memory (a row of the contract tests) in a kind of model; all that is tried follows from
the seed. The other model has another option of the memory, other sizes, another depth, another memory, or options that
do not matter.
"""

from __future__ import annotations

import re
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers import add_memory, create_model
from cached_transformers import state as states
from cached_transformers.annotations import fits, hints_of, understood
from cached_transformers.registry import MEMORIES

from .frame import Failure

ROWS, SEGMENT, VOCABULARY, TRIES = 2, 6, 11, 7
KINDS = ("language_model", "encoder_decoder", "gpt2", "vit", "timm")


@dataclass(frozen=True)
class Made:
    """A model: its kind, its memory with options, its sizes."""

    kind: str
    memory: tuple[dict[str, Any], ...]
    width: int = 16
    heads: int = 2
    depth: int = 2
    dropout: float = 0.0

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        memory: Any = list(self.memory) if len(self.memory) > 1 else self.memory[0]
        sizes = {"width": self.width, "heads": self.heads, "depth": self.depth}
        if self.kind in ("language_model", "encoder_decoder"):
            own: dict[str, Any] = {"vocabulary": VOCABULARY, "feed_forward": 16, "dropout": self.dropout}
            own |= {"max_length": 2 * SEGMENT} if self.kind == "encoder_decoder" else {}
            model = create_model(self.kind, memory=memory, **sizes, **own)
        else:
            model = add_memory(self._host(), memory, **({"segment_length": None} if self.kind == "gpt2" else {}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    def _host(self) -> nn.Module:
        if self.kind == "timm":
            import timm

            sizes = {"embed_dim": self.width, "depth": self.depth, "num_heads": self.heads, "num_classes": 3}
            return timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, **sizes)
        import transformers

        if self.kind == "gpt2":
            names = {"n_embd": self.width, "n_layer": self.depth, "n_head": self.heads, "n_positions": 64}
            names |= {"bos_token_id": 0, "eos_token_id": 0}
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **names, **drops))
        sizes = {"hidden_size": self.width, "num_hidden_layers": self.depth, "num_attention_heads": self.heads}
        sizes |= {"intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_labels": 3}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))

    def read(self, model: Any, seed: int, state: Any) -> tuple[Tensor, Any]:
        """Outputs of a segment, and the state after it."""
        torch.manual_seed(seed)
        if self.kind in ("vit", "timm"):
            out = model(torch.randn(ROWS, 3, 8, 8), memory_state=state)
        else:
            ids = torch.randint(VOCABULARY, (ROWS, SEGMENT))
            given = {"decoder_inputs_BT": ids[:, :2]} if self.kind == "encoder_decoder" else {}
            out = model(ids, **given, **{"memory_state" if self.kind == "gpt2" else "state": state})
        return (out.outputs, out.state) if hasattr(out, "outputs") else (out.logits, out.memory_state)

    def fresh(self, model: Any) -> Any:
        return (getattr(model, "init_memory_state", None) or model.init_state)(ROWS)


def cases(count: int, seed: int) -> Iterator[str]:
    """Kinds of models in turns, with memories in a random order."""
    from contract.contracts import CONTRACTS

    random = Random(seed)
    for number in range(count):
        yield f"{KINDS[(number + seed) % len(KINDS)]}|{random.choice([*CONTRACTS][1:])}|{seed}-{number}"


def prepare(shared: Path) -> None:
    """Import what cases use."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.vit.modeling_vit  # noqa: F401

    torch.set_num_threads(1)


def attempt(case: str, folder: Path) -> None:
    """Give states of a model, and damaged ones, to others."""
    from contract.contracts import CONTRACTS

    kind, label, _ = case.split("|")
    random, contract = Random(case), CONTRACTS[label]
    spec = {"name": label.partition("/")[0], **contract.options}
    beside = contract.beside if kind in KINDS[:2] else ()
    one = Made(kind, (spec, *beside), depth=random.choice([1, 2, 3]))
    warnings.simplefilter("ignore")
    with torch.no_grad():
        try:
            model = one.build()
            state = _after(one, model)
        except (ValueError, AttributeError):  # the memory does not suit this kind of model, or has no state in it
            return
        for _ in range(TRIES):
            other = _changed(one, random)
            try:
                second = other.build()
                _after(other, second)
            except Exception:  # no such model; that is the concern of other drills
                continue
            _give(one, state, other, second)
        _damage(one, model, state, random)
        _other_weights(one, model, state, folder)


def _after(made: Made, model: nn.Module, segments: int = 2) -> Any:
    state = made.fresh(model)
    for seed in range(segments):
        state = made.read(model, seed, state)[1]
    return state


def _give(one: Made, state: Any, other: Made, second: Any) -> None:
    """The state is refused, or means in the other model what its own state does."""
    told = f"{one} to {other}"
    try:
        found = other.read(second, 9, state)
    except ValueError as error:
        known = {spec["name"] for made in (one, other) for spec in made.memory}
        known |= {name for made in (state, other.fresh(second)) for name, _ in states.named_tensors(made)}
        if not any(name in str(error) for name in known):
            raise Failure(f"{told}: expected a message with the memory or the tensor, found {error}") from error
        return
    try:
        second.load_state_dict(one.build().state_dict())
    except RuntimeError as error:
        raise Failure(f"{told}: expected ValueError, found {found[0].shape} by other weights: {error}") from error
    found, wanted = (other.read(second, 9, s) for s in (state, _after(other, second)))
    for (name, a), (_, b) in zip(states.named_tensors(found), states.named_tensors(wanted), strict=True):
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), atol=1e-5, equal_nan=True):
            raise Failure(f"{told}: expected ValueError or the result of its own state, found another {name}")


def _changed(one: Made, random: Random) -> Made:
    """Another model; most often, of one option of its memory."""
    from contract.contracts import CONTRACTS

    label = random.choice([*CONTRACTS][1:])
    sizes: dict[str, list[Any]] = {"width": [8, 32], "heads": [1, 4], "depth": [one.depth % 3 + 1], "dropout": [0.1]}
    sizes["memory"] = [({"name": label.partition("/")[0], **CONTRACTS[label].options},)]
    what = random.choice(["option"] * 6 + [*sizes])
    if what in sizes:
        return replace(one, **{what: random.choice(sizes[what])})
    first, *rest = one.memory
    entry = MEMORIES.entry(first["name"])
    name = random.choice([name for name in entry.options if name not in (*MEMORIES.given, "channels", "size")])
    hint = hints_of(entry.factory)[name]
    values = _values_of(hint, first.get(name, entry.options[name].default))
    value = random.choice([value for value in values if understood(hint) and fits(value, hint)] or [3])
    return replace(one, memory=({**first, name: value}, *rest))


def _values_of(hint: Any, now: Any) -> list[Any]:
    """Other values of an option, from its annotation and its value."""
    kinds = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal]
    chosen = [value for kind in kinds for value in typing.get_args(kind) if value != now]
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [now + 1, max(1, now // 2), 2 * now]
    if isinstance(now, float):
        return [now / 2 or 0.5, now * 1.5 + 0.1]
    return chosen or [3, 0.5, None, True]


def _damage(made: Made, model: Any, state: Any, random: Random) -> None:
    """Trees that are none, of another type, or with tensors of other sizes, dtypes and devices are refused."""
    names = [name for name, t in states.named_tensors(state) if t.numel()]
    chosen = random.choice(names)

    def at(change: Callable[[Tensor], Any]) -> Any:
        place = iter(states.named_tensors(state))
        return states.map_state(lambda t: change(t) if next(place)[0] == chosen else t, state)

    trees = {
        "a list": list(state),
        "a word": "abc",
        "a dict": {"state": state},
        "an array": torch.zeros(2).numpy(),
        "an empty tuple": (),
        "a tensor": torch.zeros(ROWS),
        "a list inside": state._replace(layers=list(state.layers) or [()]),
        "a word inside": state._replace(layers="abc"),
        "nothing inside": state._replace(layers=None),
        "an array inside": at(Tensor.numpy),
        "rows": states.repeat(state, 2),
        "a row": states.reorder(state, torch.tensor([0])),
        "another dtype": at(lambda t: t.to(torch.int32)),
        "no values": at(lambda t: t.to("meta")),
        "another dimension": at(lambda t: t[..., None]),
    }
    for name, tree in trees.items():
        _refused(f"{made}: {name} ({chosen})", lambda tree=tree: made.read(model, 9, tree))
    index, marks = torch.tensor([0, ROWS]), torch.zeros(ROWS + 1, dtype=torch.bool)
    fresh = made.fresh(model)
    calls: dict[str, Callable[[], Any]] = {
        "reorder": lambda: states.reorder(state, index),
        "reorder a list": lambda: states.reorder(state, [0]),
        "reset": lambda: states.reset(state, fresh, marks),
        "reset by numbers": lambda: states.reset(state, fresh, torch.zeros(ROWS)),
        "reset from another": lambda: states.reset(state, fresh[:1], marks[:ROWS]),
        "join": lambda: states.join([state, state[0]]),
        "join none": lambda: states.join([]),
        "repeat": lambda: states.repeat(state, 0),
        "save": lambda: states.save(states.to(state, "meta"), "state"),
    }
    for name in ("detach", "nbytes", "signature", "summary", "seal"):
        calls[f"{name} of a word"] = lambda name=name: getattr(states, name)("abc")
    for name, call in calls.items():
        _refused(f"{made}: {name}", call)


def _refused(told: str, call: Callable[[], Any]) -> None:
    try:
        found = call()
    except (ValueError, TypeError) as error:
        if re.search(r"\b(state|states|fresh|rows_B|index_B|times)\b", str(error)) is None:
            raise Failure(f"{told}: expected a message that names the argument, found {error}") from error
        return
    raise Failure(f"{told}: expected ValueError, found {str(found)[:200]}")


def _other_weights(made: Made, model: Any, state: Any, folder: Path) -> None:
    """A state with the fingerprint of its weights is read with these, and refused with others."""
    states.save(state, folder / "state", model=model)
    made_by = states.fingerprint(model)
    fresh = made.fresh(model)
    loaded = states.load(folder / "state", fresh, model=model)
    if states.signature(loaded) != states.signature(state):
        raise Failure(f"{made}: expected the saved state, found another")
    states.check_weights(made_by, model)
    next(model.parameters()).flatten()[0].add_(1e-3)
    _refused(f"{made}: a file of other weights", lambda: states.load(folder / "state", fresh, model=model))
    _refused(f"{made}: other weights", lambda: states.check_weights(made_by, model))


SUMMARY = (
    f"states given to {TRIES} models a case, of another memory, option, size or depth, and damaged states: they are "
    "refused by a message with the memory, the tensor or the argument, or mean the same"
)
COUNT, SAMPLE = 250, 6
