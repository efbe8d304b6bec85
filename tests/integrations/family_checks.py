"""What a family has to do with a memory; each check raises where it does not. Fast tests take a sample of families,
`test_support.py` all of them, and writes what it finds into docs/support.md."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from integrations.families import END, PAD, ROWS, SEGMENT, Family, words
from integrations.hosts import close_gates
from integrations.transformers_hosts import awaken, differences
from torch import Tensor, nn

from cached_transformers import load_pretrained, remove_memory
from cached_transformers.integrations.transformers.memory_cache import MemoryCache
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory, Query
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import map_state, reorder, reset

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
SHARED: dict[str, dict[str, Any]] = {"grc": {"name": "grc"}, "attention_cache": {"name": "attention_cache"}}
"""The memories that models take whose tokens see their whole segment."""
BY_ROW = {name: STREAMS[name] for name in ("grc_stream", "rmt")}
"""Those with a state that such models are tried with."""
KINDS: dict[str, dict[str, Any]] = {
    **{name: STREAMS[name] for name in BESIDE},
    "compressive at its age": {**STREAMS["compressive"], "function": "max", "positions": "age"},
    "compressive trained by the task": {**STREAMS["compressive"], "function": "conv", "loss": "task"},
    "crtn, each token": {**STREAMS["crtn"], "scope": "token"},
    "crtn, asked twice": {**STREAMS["crtn"], "query": "compute_first"},
    "rmt with a cache": {"name": "rmt", "length": 2, "cache": 5},
    "rmt that reads its cache": {"name": "rmt", "length": 2, "cache": 5, "read_cache": True},
    "memory_transformer with a cache": {"name": "memory_transformer", "length": 2, "cache": 5},
    "read_twice": {"name": "read_twice", "attention": "joint", "slots": 4},
}
"""Memories of stored states, for Llama."""
BLOCKS = {"name": "block_retrieval", "retrieve": "segments"}
"""A prompt asks nothing, so that answers without a cache are comparable."""
RECENT: dict[str, dict[str, Any]] = {
    "armt/gpt2": {"name": "armt", "length": 3, "key_width": 6},
    "armt/llama": {"name": "armt", "length": 3, "key_width": 6, "preset": "long"},
    "armt/llama/mask": {"name": "armt", "length": 3, "key_width": 6, "mask": "full"},
    "read_twice/llama": {"name": "read_twice", "slots": 6, "new_layers": 1},
    "grc_stream/llama": {"name": "grc_stream", "length": 4, "preset": "text"},
    "infini/gpt2": {"name": "infini", "update": "exact", "initial_gate": -4.0},
    "infini/llama": {"name": "infini"},
    "delta_mem/gpt2": {"name": "delta_mem", "half_life": 4.0},
    "delta_mem/llama": {"name": "delta_mem", "rank": 4, "states": 2, "gates": "one", "half_life": 4.0},
    "delta_mem/llama/segment": {"name": "delta_mem", "write": "segment"},
    "titans/gpt2": {"name": "titans", "chunk": 4, "mix": "sum"},
    "titans/llama": {"name": "titans", "chunk": 4},
    "titans/llama/context": {"name": "titans", "chunk": 4, "place": "context", "persistent": 2},
    "block_recurrent/gpt2": {"name": "block_recurrent", "length": 4, "preset": "trained"},
    "block_recurrent/llama": {"name": "block_recurrent", "length": 4, "layers": "all", "gate": "lstm"},
    "memory_caching/gpt2": {"name": "memory_caching", "over": {"name": "titans", "chunk": 4}, "slots": 2},
    "memory_caching/llama": {"name": "memory_caching", "slots": 3, "start": "restart"},
    "memory_caching/llama/ttt": {"name": "memory_caching", "over": {"name": "ttt", "mini_batch": 4}, "slots": 2},
    "ttt/gpt2": {"name": "ttt", "mini_batch": 4, "model": "mlp"},
    "ttt/llama": {"name": "ttt", "mini_batch": 3},
    "lact/gpt2": {"name": "lact", "rate": 0.1},
    "lact/llama": {"name": "lact", "nets": 2, "muon": True, "momentum": True},
    "streaming_llm/llama": {"name": "streaming_llm", "length": 6, "sinks": 2},
    "block_retrieval/llama": {**BLOCKS, "sinks": 2, "recent": 4, "block": 2, "topk": 2},
    "block_retrieval/llama/ring": {**BLOCKS, "recent": 2, "block": 2, "topk": 1, "capacity": 3},
    "expire_span/llama": {"name": "expire_span", "length": 12, "ramp": 6, "price": 0},
}
"""Memories and their host."""


def equal(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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
    whole, logits = model(ids, labels=ids), torch.cat(parts, 1)
    equal(logits, whole.logits)
    equal(whole.loss, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert differences(whole.memory_state, state) < 1e-4 and isinstance(model(ids, return_dict=False), tuple)
    if memory["name"] != "memory_transformer":
        changed = torch.cat([(ids[:, :1] + 1).clamp(max=63), ids[:, 1:]], 1)
        assert (model(changed).logits - model(ids).logits)[:, SEGMENT:].abs().max() > 1e-6


def row_of(state: Any, index: int) -> Any:
    return map_state(lambda t: t[index : index + 1], state)


def ragged() -> tuple[Tensor, Tensor]:
    """Three texts of 13, 3 and 5 tokens that end in one column, and their mask."""
    mask = (torch.arange(13) >= torch.tensor([0, 10, 8])[:, None]).long()
    return words(3, 13).masked_fill(mask == 0, PAD), mask


def rows_alone(family: Family, memory: dict[str, Any]) -> None:
    """A row after a state is the row alone, wherever its padding is; places as generate counts them change nothing."""
    model = awaken(family.with_memory(memory)).train()
    mask = torch.ones(4, 13, dtype=torch.long)
    mask[0, :10] = mask[1, -6:] = mask[2, :1] = mask[2, -2:] = 0
    ids, past = words(4, 13).masked_fill(mask == 0, PAD), model(words(4, 7, seed=5)).memory_state
    call = {"attention_mask": mask, "memory_state": past, "output_hidden_states": True}
    whole = model(ids, labels=ids.masked_fill(mask == 0, -100), **call)
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    equal(model(ids, position_ids=places, **call).logits[mask.bool()], whole.logits[mask.bool()])
    for row, real in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, real], memory_state=row_of(past, row), output_hidden_states=True)
        equal(whole.logits[row, real], alone.logits[0])
        equal(whole.hidden_states[1][row, real], alone.hidden_states[1][0])
        assert differences(row_of(whole.memory_state, row), alone.memory_state) < 1e-4
    nothing = model(ids, attention_mask=torch.zeros_like(mask), memory_state=past).memory_state
    assert differences(nothing, past) == 0
    whole.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def in_pieces(family: Family, memory: dict[str, Any]) -> None:
    """A text in calls of any size, with padding in front, behind and between, is the text: `past_key_values` continue
    the open segment, say their state at any time and follow beams."""
    model, ids = awaken(family.with_memory(memory)), words(3, 18)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = mask[1, 9:12] = mask[2, 3:5] = mask[2, 17:] = 0
    cache, parts, done = None, [], 0

    def alone(row: int, *more: Tensor) -> Any:
        return model(torch.cat([ids[row : row + 1, :done][:, mask[row, :done].bool()], *more], 1))

    for size in (5, 1, 6, 1, 4, 1):
        done += size
        out = model(ids[:, done - size : done], attention_mask=mask[:, :done], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
        twin = copy.deepcopy(cache)
        assert isinstance(cache, MemoryCache) and twin.compute_state.__self__ is cache.compute_state.__self__
        for row in range(3 if size == 1 else 0):  # inside of segments
            assert differences(row_of(twin.memory_state, row), alone(row).memory_state) < 1e-4
    for row, logits in enumerate(torch.cat(parts, 1)):
        equal(logits[mask[row].bool()], alone(row).logits[0])
    order, more = torch.tensor([2, 0, 0]), words(3, 1, 9)
    cache.reorder_cache(order)
    full = torch.cat([mask[order], torch.ones_like(more)], 1)
    found = model(more, attention_mask=full, past_key_values=cache, use_cache=True).logits
    for row, of in enumerate(order.tolist()):
        equal(found[row, -1], alone(of, more[row : row + 1]).logits[0, -1])


@torch.no_grad()
def moves_rows(family: Family, memory: dict[str, Any]) -> None:
    """Rows of a state are forgotten and moved each for itself; copies and pickles of a model are of their own."""
    model, ids = awaken(family.with_memory(memory)), words(3, SEGMENT, seed=1)
    state = model(words(3, 2 * SEGMENT)).memory_state
    expected, fresh = model(ids, memory_state=state).logits, model(ids).logits
    forgotten = reset(state, model.init_memory_state(3), torch.tensor([False, True, False]))
    equal(model(ids, memory_state=forgotten).logits, torch.stack([expected[0], fresh[1], expected[2]]))
    order = torch.tensor([2, 0, 0])
    equal(model(ids[order], memory_state=reorder(state, order)).logits, expected[order])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids, memory_state=state).logits, expected)
        assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
        awaken(twin, seed=8)
        assert torch.equal(model(ids, memory_state=state).logits, expected)
        assert not torch.equal(twin(words()).logits, model(words()).logits)


@torch.no_grad()
def hears_no_later_token(family: Family, memory: dict[str, Any]) -> None:
    """An output depends on its own token and on none that follows."""
    model, ids = awaken(family.with_memory(memory)), words(1, 3 * SEGMENT)
    before = model(ids).logits
    for place in (2, SEGMENT, 2 * SEGMENT - 1, 2 * SEGMENT + 1):
        changed = ids.clone()
        changed[:, place] = 3 + (changed[:, place] - 2) % 27
        after = model(changed).logits
        equal(after[:, :place], before[:, :place])
        assert (after - before)[:, place].abs().max() > 1e-6


@torch.no_grad()
def answers_alone(family: Family, memory: dict[str, Any], **options: Any) -> None:
    """Prompts of unequal length after a state: the text of each alone, with and without keys and values (sampled, the
    same draws). The state that comes back has read all but the last token."""
    model, (ids, mask) = awaken(family.with_memory(memory)), ragged()
    past = model(words(3, SEGMENT + 1, seed=5)).memory_state
    call = {"max_new_tokens": 2 * SEGMENT + 1, "do_sample": False, "return_dict_in_generate": True, **options}
    call = {"output_scores": True, "pad_token_id": PAD, **call}
    found = []
    for use in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(ids, attention_mask=mask, memory_state=past, use_cache=use, **call))
    said, again = found
    assert torch.equal(said.sequences, again.sequences)
    for a, b in zip(said.scores, again.scores, strict=True):
        equal(a, b, 1e-4)
    assert differences(said.memory_state, again.memory_state) < 1e-4
    torch.manual_seed(5)
    forgetful = model.generate(ids, attention_mask=mask, **call)
    first = (forgetful.scores[0] - said.scores[0]).nan_to_num(0, 0, 0).abs().max()
    assert first > 1e-4  # the memory is heard from the first token on
    copies = call.get("num_return_sequences", 1)
    assert len(said.sequences) == 3 * copies
    for row, tokens in enumerate(said.sequences):
        text, own = ids[row // copies, mask[row // copies].bool()][None], row_of(past, row // copies)
        new = tokens[ids.shape[1] :]
        ended = (new == END).nonzero()
        new = new[: int(ended[0]) + 1 if len(ended) else len(new)]
        read = torch.cat([text, new[None, :-1]], 1)
        after = model(read, memory_state=own).memory_state
        assert differences(row_of(said.memory_state, row), after) < 1e-4
        if not call["do_sample"]:
            alone = model.generate(text, attention_mask=torch.ones_like(text), memory_state=own, **call)
            assert torch.equal(alone.sequences[0, text.shape[1] :][: len(new)], new)


def answers_by_beams(family: Family, memory: dict[str, Any]) -> None:
    answers_alone(family, memory, num_beams=3)


def answers_sampled(family: Family, memory: dict[str, Any]) -> None:
    """Two for each prompt."""
    answers_alone(family, memory, do_sample=True, num_return_sequences=2)


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
    """The same text with and without keys and values, of decoders over more than two segments; and what the model would
    say."""
    model = awaken(family.with_memory(memory)).eval()
    options: dict[str, Any] = {"do_sample": False, "num_beams": beams}
    if family.kind == "decoders":
        prompt = {"input_ids": words(tokens=4)}
        options |= {"max_new_tokens": 9, "eos_token_id": None}
    else:
        prompt = {name: t for name, t in family.given().items() if name != "decoder_input_ids"}
        options |= {"max_new_tokens": 6, "min_new_tokens": 6}
    kept, again = (model.generate(**prompt, use_cache=use, **options) for use in (True, False))
    assert torch.equal(kept, again)
    if family.kind == "decoders":
        assert kept.shape[1] == 13
        assert beams > 1 or torch.equal(model(kept[:, :-1]).logits[:, 3:].argmax(-1), kept[:, 4:])


def searches(family: Family, memory: dict[str, Any]) -> None:
    """Beams: the same text with and without keys and values."""
    generates(family, memory, beams=3)


def _answer(family: Family, memory: dict[str, Any]) -> Callable[..., Tensor]:
    return by_row if family.kind == "decoders" or memory["name"] in BY_ROW else twice


def _gradients(family: Family, memory: dict[str, Any], checkpointing: bool) -> dict[str, Tensor]:
    """Of a decoder's loss, or of the second of two steps, which finds what the first has left in a shared memory."""
    model = awaken(family.with_memory(memory))
    if checkpointing:
        (getattr(model, "gradient_checkpointing_enable", None) or model.set_grad_checkpointing)()
    model.train()
    for _ in range(1 if family.kind == "decoders" else 2):
        model.zero_grad()
        torch.manual_seed(5)
        if family.kind == "decoders":
            loss = model(input_ids=words(), labels=words()).loss
        else:
            out = by_row(family, model) if memory["name"] in BY_ROW else family.output(model(**family.given()))
            loss = out.square().sum()
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trains(family: Family, memory: dict[str, Any]) -> None:
    """Every parameter of the memory gets a gradient."""
    _all_train(_gradients(family, memory, False), family.with_memory(memory))


def _all_train(gradients: dict[str, Tensor], model: nn.Module) -> None:
    ours = [name for name, p in model.named_parameters() if "memory." in name and p.requires_grad]
    memories = [m for m in model.modules() if isinstance(m, LayerMemory | ModelMemory)]
    assert memories and (ours or not any(True for memory in memories for _ in memory.parameters()))
    idle = [name for name in ours if name not in gradients or not gradients[name].abs().max() > 0]
    assert not idle, f"no gradient: {idle}"


def checkpoints(family: Family, memory: dict[str, Any]) -> None:
    """Activation checkpointing changes no gradient, the host's and the memory's alike."""
    plain, again = (_gradients(family, memory, on) for on in (False, True))
    assert plain.keys() == again.keys()
    for name in plain:
        if family.kind == "decoders":
            equal(again[name], plain[name])
        else:
            scale = float(plain[name].abs().max()) + 1e-6
            equal(again[name] / scale, plain[name] / scale, 1e-4)


@torch.no_grad()
def saves(family: Family, memory: dict[str, Any]) -> None:
    """What was saved says the same when it is loaded, cache and all."""
    model, answer = awaken(family.with_memory(memory)).train(), _answer(family, memory)
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


@torch.no_grad()
def shared_plain_again(family: Family, memory: dict[str, Any]) -> None:
    """As `plain_again`."""
    plain, given, answer = family.build(), family.given(2), _answer(family, memory)
    model = awaken(family.with_memory(memory))
    before = family.output(plain(**given))
    if answer is twice:
        twice(family, model.train())
    found = by_row(family, model, given) if answer is by_row else family.output(model.eval()(**given))
    assert (found - before).abs().max() > 1e-4
    if answer is twice:
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
    a, b = (_answer(family, memory)(family, awaken(family.with_memory(memory)), batch) for batch in (given, other))
    rows = hidden.bool() if a.shape[:2] == hidden.shape else torch.ones(a.shape[:2], dtype=torch.bool)
    equal(a[rows], b[rows])


@torch.no_grad()
def shared_compiles(family: Family, memory: dict[str, Any]) -> None:
    """As `compiles`."""
    model, answer = awaken(family.with_memory(memory)).eval(), _answer(family, memory)
    expected = answer(family, model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    equal(answer(family, compiled), expected)


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
