"""What a family has to do with a memory; each check raises where it does not. Fast tests take a sample of families,
`test_support.py` all of them, and writes what it finds into docs/support.md."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from integrations.families import ROWS, SEGMENT, Family, words
from integrations.hosts import close_gates
from integrations.transformers_hosts import awaken
from torch import Tensor, nn

from cached_transformers import load_pretrained, remove_memory
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory, Query
from cached_transformers.layers.stack import ModelOutput

STREAMS: dict[str, dict[str, Any]] = {
    "grc_stream": {"name": "grc_stream", "length": 4},
    "memorizing": {"name": "memorizing", "length": 16, "k": 4},
    "rmt": {"name": "rmt", "length": 3},
    "memory_transformer": {"name": "memory_transformer", "length": 3},
    "armt": {"name": "armt", "length": 3, "key_width": 4},
    "transformer_xl": {"name": "transformer_xl", "length": 7},
    "compressive": {"name": "compressive", "length": 4, "compressed": 3, "rate": 2, "function": "mean"},
    "ernie_doc": {"name": "ernie_doc", "length": 7},
    "infinity_former": {
        **{"name": "infinity_former", "length": 4, "chunk": 2, "basis": 4},
        **{"widths": (0.2,), "kl_weight": 0},
    },
    "crtn": {"name": "crtn", "segment": SEGMENT, "regions": 2, "topk": 1, "scale": True, "temperature": 4.0},
}
"""The memories that decoders take; the last five attend stored states, for which not all have a place."""
BESIDE = ("transformer_xl", "compressive", "ernie_doc", "infinity_former", "crtn")
CAUSAL = {name: {**STREAMS[name], "mask": "causal"} for name in ("rmt", "memory_transformer")}
"""Those of them that are given to a model that takes no masks."""
SHARED: dict[str, dict[str, Any]] = {
    "grc": {"name": "grc"},
    "attention_cache": {"name": "attention_cache"},
}
"""The memories that models take whose tokens see their whole segment."""
BY_ROW = {name: STREAMS[name] for name in ("grc_stream", "rmt")}
"""Those with a state that such models are tried with."""


def equal(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ---- of decoders


def segments(model: Any, ids: Tensor) -> Tensor:
    """Logits of a model without memory, of each segment alone."""
    return torch.cat([model(piece).logits for piece in ids.split(SEGMENT, 1)], 1)


@torch.no_grad()
def plain_again(family: Family, memory: dict[str, Any]) -> None:
    """A memory shows; closed or taken away, it leaves what was there."""
    plain, ids = family.build(), words()
    model = awaken(family.with_memory(memory))
    assert (model(ids).logits - segments(plain, ids)).abs().max() > 1e-4
    if memory["name"] in ("grc_stream", "memorizing"):
        close_gates(model)
        equal(model(ids).logits, segments(plain, ids))
    assert torch.equal(remove_memory(model)(ids).logits, plain(ids).logits)


@torch.no_grad()
def carries(family: Family, memory: dict[str, Any]) -> None:
    """Reading in segments is carrying the state by hand."""
    model, ids = awaken(family.with_memory(memory)), words()
    state, parts = None, []
    for piece in ids.split(SEGMENT, 1):
        out = model(piece, memory_state=state)
        state = out.memory_state
        parts.append(out.logits)
    equal(torch.cat(parts, 1), model(ids).logits)
    if memory["name"] != "memory_transformer":
        changed = torch.cat([(ids[:, :1] + 1).clamp(max=63), ids[:, 1:]], 1)
        assert (model(changed).logits - model(ids).logits)[:, SEGMENT:].abs().max() > 1e-6


@torch.no_grad()
def packs(family: Family, memory: dict[str, Any]) -> None:
    """Documents in a row, told by ids or by places, are what each is alone; no token is asked for one of another."""
    lengths = (SEGMENT + 2, 1, SEGMENT)
    model, ids = awaken(family.with_memory(memory)), words(1, sum(lengths))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    alone = [model(text).logits[0] for text in ids.split(lengths, 1)]
    told = model(ids, labels=ids, document_ids=numbers)
    equal(told.logits[0], torch.cat(alone), 1e-5)
    equal(model(ids, position_ids=places).logits, told.logits, 1e-5)
    asked = torch.cat([logits[:-1] for logits in alone])
    equal(told.loss, torch.nn.functional.cross_entropy(asked, ids[:, 1:][numbers.diff() == 0]), 1e-5)


@torch.no_grad()
def remembers_all(family: Family) -> None:
    """A memory that keeps all that was read makes segments of the host's own text, and forgets nothing of it."""
    plain, model, ids = family.build(), family.with_memory({"name": "transformer_xl", "length": 12}), words()
    equal(model(ids).logits, plain(ids).logits, 1e-5)
    assert (plain(ids).logits - segments(plain, ids)).abs().max() > 1e-4


@torch.no_grad()
def generates(family: Family, memory: dict[str, Any], beams: int = 1) -> None:
    """The same text with and without keys and values, over more than two segments; and what the model would say."""
    model, prompt = awaken(family.with_memory(memory)), words(tokens=4)
    options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    kept, anew = (model.generate(prompt, use_cache=use, **options) for use in (True, False))
    assert kept.shape[1] == 13 and torch.equal(kept, anew)
    if beams == 1:
        assert torch.equal(model(kept[:, :-1]).logits[:, 3:].argmax(-1), kept[:, 4:])


def searches(family: Family, memory: dict[str, Any]) -> None:
    """Beams: the same text with and without keys and values."""
    generates(family, memory, beams=3)


def _gradients(model: Any, ids: Tensor, checkpointing: bool) -> dict[str, Tensor]:
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trains(family: Family, memory: dict[str, Any]) -> None:
    """Every parameter of the memory gets a gradient."""
    _all_train(_gradients(awaken(family.with_memory(memory)), words(), False), family.with_memory(memory))


def _all_train(gradients: dict[str, Tensor], model: nn.Module) -> None:
    ours = [name for name, p in model.named_parameters() if "memory." in name and p.requires_grad]
    memories = [m for m in model.modules() if isinstance(m, LayerMemory | ModelMemory)]
    assert memories and (ours or not any(True for memory in memories for _ in memory.parameters()))
    idle = [name for name in ours if name not in gradients or not gradients[name].abs().max() > 0]
    assert not idle, f"no gradient: {idle}"


def checkpoints(family: Family, memory: dict[str, Any]) -> None:
    """Activation checkpointing changes no gradient, the host's and the memory's alike."""
    plain, again = (_gradients(awaken(family.with_memory(memory)), words(), on) for on in (False, True))
    assert plain.keys() == again.keys()
    for name in plain:
        equal(again[name], plain[name])


@torch.no_grad()
def saves(family: Family, memory: dict[str, Any]) -> None:
    """What was saved says the same when it is loaded."""
    model, ids = awaken(family.with_memory(memory)), words()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        equal(load_pretrained(folder)(ids).logits, model(ids).logits)


def compiles(family: Family, memory: dict[str, Any]) -> None:
    """torch.compile traces one graph for a segment, with the same values."""
    model, ids = awaken(family.with_memory(memory)), words(tokens=2 * SEGMENT)
    expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled, state = torch.compile(model, backend="eager", fullgraph=True, dynamic=False), model.init_memory_state(2)
    for piece, wanted in zip(ids.split(SEGMENT, 1), expected.split(SEGMENT, 1), strict=True):
        out = compiled(piece, use_cache=False, memory_state=state)
        state = out.memory_state
        equal(out.logits, wanted)


# ---- of models whose tokens see their whole segment


def by_row(family: Family, model: Any, given: dict[str, Any] | None = None) -> Tensor:
    """The output behind a state: of a text, that of all its segments; of images, that of the third frame."""
    torch.manual_seed(5)
    if "segment_length" in family.carrying:
        return family.output(model(**(given or family.given())))
    state = model.init_memory_state(ROWS)
    for seed in range(3):
        out = model(**family.given(seed), memory_state=state)
        state = out.state if isinstance(out, ModelOutput) else out.memory_state
    return out.outputs if isinstance(out, ModelOutput) else family.output(out)


def twice(family: Family, model: Any, given: dict[str, Any] | None = None) -> Tensor:
    """The output of a second training forward, which finds a cache that the first has filled."""
    torch.manual_seed(5)
    for _ in range(2):
        out = family.output(model(**(given or family.given())))
    return out


def _answer(memory: dict[str, Any]) -> Callable[..., Tensor]:
    return by_row if memory["name"] in BY_ROW else twice


def row_plain_again(family: Family, memory: dict[str, Any]) -> None:
    """As `plain_again`, of a memory with a state."""
    plain, given = family.build(), family.given(2)
    model = awaken(family.with_memory(memory))
    with torch.no_grad():
        before = family.output(plain(**given))
        assert (by_row(family, model, given) - before).abs().max() > 1e-4
        removed = remove_memory(model)
        assert torch.equal(family.output(removed(**given)), before)


def shared_plain_again(family: Family, memory: dict[str, Any]) -> None:
    """As `plain_again`."""
    plain, given = family.build(), family.given()
    model = awaken(family.with_memory(memory)).train()
    with torch.no_grad():
        twice(family, model)
        model.eval()
        before = family.output(plain(**given))
        assert (family.output(model(**given)) - before).abs().max() > 1e-4
        close_gates(model)
        equal(family.output(model(**given)), before)
        assert torch.equal(family.output(remove_memory(model)(**given)), before)


@torch.no_grad()
def shared_pads(family: Family, memory: dict[str, Any]) -> None:
    """What stands in padding is neither read nor remembered."""
    given = family.given()
    hidden = given.get("attention_mask")
    if hidden is None or "input_ids" not in given:
        return
    other = {**given, "input_ids": torch.where(hidden > 0, given["input_ids"], 7)}
    a, b = (_answer(memory)(family, awaken(family.with_memory(memory)), batch) for batch in (given, other))
    rows = hidden.bool() if a.shape[:2] == hidden.shape else torch.ones(a.shape[:2], dtype=torch.bool)
    equal(a[rows], b[rows])


def _shared_gradients(family: Family, memory: dict[str, Any], checkpointing: bool) -> dict[str, Tensor]:
    model = awaken(family.with_memory(memory))
    if checkpointing:
        (getattr(model, "gradient_checkpointing_enable", None) or model.set_grad_checkpointing)()
    model.train()
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(5)
        out = by_row(family, model) if memory["name"] in BY_ROW else family.output(model(**family.given()))
        out.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def shared_trains(family: Family, memory: dict[str, Any]) -> None:
    """As `trains`."""
    _all_train(_shared_gradients(family, memory, False), family.with_memory(memory))


def shared_checkpoints(family: Family, memory: dict[str, Any]) -> None:
    """As `checkpoints`."""
    plain, again = (_shared_gradients(family, memory, on) for on in (False, True))
    assert plain.keys() == again.keys()
    for name in plain:
        scale = float(plain[name].abs().max()) + 1e-6
        equal(again[name] / scale, plain[name] / scale, 1e-4)


@torch.no_grad()
def shared_saves(family: Family, memory: dict[str, Any]) -> None:
    """As `saves`, cache and all."""
    model, answer = awaken(family.with_memory(memory)).train(), _answer(memory)
    answer(family, model)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
            again = load_pretrained(folder)
        else:
            torch.save(model.state_dict(), f"{folder}/weights")
            again = family.with_memory(memory, seed=9).eval()
            again.load_state_dict(torch.load(f"{folder}/weights"))
        equal(answer(family, again), answer(family, model))


@torch.no_grad()
def shared_generates(family: Family, memory: dict[str, Any], beams: int = 1) -> None:
    """As `generates`; of encoder-decoders."""
    model = awaken(family.with_memory(memory)).eval()
    given = {name: t for name, t in family.given().items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams}
    assert torch.equal(*(model.generate(**given, use_cache=use, **options) for use in (True, False)))


def shared_searches(family: Family, memory: dict[str, Any]) -> None:
    """As `searches`."""
    shared_generates(family, memory, beams=3)


@torch.no_grad()
def shared_compiles(family: Family, memory: dict[str, Any]) -> None:
    """As `compiles`."""
    model, answer = awaken(family.with_memory(memory)).eval(), _answer(memory)
    expected = answer(family, model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    equal(answer(family, compiled), expected)


# ---- of both


class SeenByAttention(torch.overrides.TorchFunctionMode):
    """The queries, keys and values that a layer's own attention is computed with; (B, H or G, N, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Tensor, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
            self.operands = [(given["query"], given["key"].mT), (args[0], given["value"])]
        elif func in (torch.matmul, torch.Tensor.matmul, torch.bmm, torch.Tensor.__matmul__):
            self.operands.append(tuple(args[:2]))
        elif func is torch.Tensor.baddbmm:
            self.operands.append((kwargs["batch1"], kwargs["batch2"]))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def sees_the_layers_own(family: Family) -> None:
    """A memory is given the queries, keys and values that the layer compares: those of the first token, which no
    position turns, are the very same, but for a number (OPT scales its queries, YaRN both)."""
    model = family.with_memory(STREAMS["memorizing"])
    memory = next(m for m in model.modules() if isinstance(m, LayerMemory) and m.needs)
    read, asked, seen = memory.read, [], SeenByAttention()

    def watched(state: Any, query: Query, project: Any) -> Any:
        asked.append((query, *seen.operands[-2:]))
        return read(state, query, project)

    memory.read = watched  # type: ignore[method-assign]
    given = {"input_ids": words(tokens=SEGMENT)} if family.carrying else family.given()
    with seen:
        model(**given)
    query, (q, k), (_, v) = asked[0]
    heads = query.q_BHNE.shape[1]
    q, k, v = (t.unflatten(0, (-1, heads)) if t.dim() == 3 else t for t in (q, k.mT, v))
    equal(v.repeat_interleave(heads // v.shape[1], 1), query.v_BHNE)
    if family.name.startswith("deberta"):
        return  # whose products of queries and keys are followed by those with relative positions
    if family.name == "hunyuan_v1_dense":
        return  # which normalises what is turned already
    for found, expected in ((query.q_BHNE, q), (query.k_BHNE, k.repeat_interleave(heads // k.shape[1], 1))):
        ratio = (expected[:, :, 0] / found[:, :, 0]).flatten()
        equal(ratio, ratio[:1].expand_as(ratio), 1e-3)
