"""Decoders with recurrent layers beside those that attend: their states cross segments together with the memory's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations import family_checks as checks
from integrations import wrapped_checks as wrapped
from integrations.families import HYBRIDS, SEGMENT, WITHOUT, Family, families, words
from integrations.hosts import close_gates
from integrations.transformers_hosts import awaken, differences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cached_transformers import SegmentLoop, Session, add_memory, remove_memory
from cached_transformers.integrations import hosts
from cached_transformers.integrations.transformers.export import export_cache
from cached_transformers.state import map_state, named_tensors

NAMED = {family.name: family for family in HYBRIDS}
KINDS = [NAMED[name] for name in ("bamba", "lfm2", "qwen3_next")]
"""Mamba 2, whose single tokens write in place; short convolutions; gated delta rules, with gates beside queries."""
GRC = checks.STREAMS["grc_stream"]
TOKENS = 2 * SEGMENT + 1
"""The last segment has one token."""


def closed(family: Family, **options: Any) -> Any:
    model = family.with_memory(GRC, **options)
    close_gates(model)
    return model


def within_segments(plain: Any, ids: Tensor) -> Tensor:
    """Logits of a host without memory, whose attention sees its own segment alone, and whose recurrent layers all."""
    tokens = ids.shape[1]
    number_N = torch.arange(tokens) // SEGMENT
    sees_NN = (number_N[:, None] == number_N) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masks: dict[str, Any] = dict.fromkeys(plain.config.layer_types)
    masks["full_attention"] = sees_NN.expand(len(ids), 1, -1, -1)
    places = torch.arange(tokens)[None] % SEGMENT
    return plain(ids, attention_mask=masks, position_ids=places, use_cache=False).logits  # type: ignore[no-any-return]


class Wide(TorchFunctionMode):
    """Compute in 64 bits the parts that a host computes in 32 bits with any weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = (tuple(args), dict(kwargs or {})) if func is torch.Tensor.to else (args, kwargs or {})
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {name: torch.float64 if a is torch.float32 else a for name, a in kwargs.items()}
        return func(*args, **kwargs)


def wide(model: Any) -> Any:
    """The model in 64 bits; its experts by matrix products that have them."""
    with contextlib.suppress(ValueError):
        model.set_experts_implementation("eager")
    return model.double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if ".memory." not in name and p.grad is not None}


@families(HYBRIDS)
def test_recurrent_states_cross_segments(family: Family) -> None:
    """So do gradients, through the segment of one token as well."""
    plain, model, ids = wide(family.build()), wide(closed(family)), words(tokens=TOKENS)
    with Wide():
        expected, out = within_segments(plain, ids), model(ids)
        checks.equal(out.logits, expected, 1e-10)
        assert (expected - checks.segments(plain, ids)).abs().max() > 1e-4
        for logits in (expected, out.logits):
            F.cross_entropy(logits[:, -3:].flatten(0, 1), ids[:, :3].flatten()).backward()
    wanted, found = gradients(plain), gradients(model)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        checks.equal(found[name], gradient, 1e-9)


@torch.no_grad()
@families(HYBRIDS)
def test_the_host_is_what_it_was(family: Family) -> None:
    """In 32 bits, with states that begin empty, and after the memory was removed."""
    plain, model, ids = family.build(), closed(family), words(tokens=TOKENS)
    checks.equal(model(ids).logits, within_segments(plain, ids), 1e-5)
    checks.equal(model(ids, memory_state=model.init_memory_state(2)).logits, model(ids).logits, 1e-6)
    assert torch.equal(remove_memory(model)(ids).logits, plain(ids).logits)


ANY: list[Callable[..., None]] = [checks.carries, checks.rows_alone, checks.in_pieces, checks.packs]
ANY += [checks.trains, checks.checkpoints, checks.saves]
SOME: list[Callable[..., None]] = [checks.moves_rows, checks.hears_no_later_token, checks.answers_alone]
SOME += [checks.generates, checks.searches, wrapped.adapts, wrapped.replicated, wrapped.cut_up]
PROPERTIES = [
    *((check, family, "grc_stream") for check in ANY for family in HYBRIDS),
    *((check, family, "grc_stream") for check in SOME for family in KINDS),
    *((check, NAMED["nemotron_h"], "memorizing") for check in ANY),
    *((check, NAMED["qwen3_5_text"], "compressive") for check in (*ANY, checks.answers_by_beams)),
    (checks.answers_sampled, NAMED["bamba"], "grc_stream"),
]


@pytest.mark.slow
def test_a_hybrid_is_compiled() -> None:
    checks.compiles(NAMED["lfm2"], checks.STREAMS["grc_stream"])


@pytest.mark.parametrize("check, family, memory", [pytest.param(*c, id=f"{c[0].__name__}-{c[1]}") for c in PROPERTIES])
def test_a_hybrid_with_a_memory(check: Callable[..., None], family: Family, memory: str) -> None:
    check(family, checks.STREAMS[memory])


@families(KINDS)
def test_a_loop_detaches_the_states_after_its_segments(family: Family) -> None:
    plain, ids = wide(family.build()), words(tokens=TOKENS + 1)
    with Wide():
        F.cross_entropy(within_segments(plain, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    wanted = gradients(plain)
    for bptt in (3, 1):
        model = wide(closed(family))
        with Wide():
            loss, state = SegmentLoop(model, SEGMENT, bptt=bptt)(ids[:, :-1], ids[:, 1:])
            loss.backward()
        found = gradients(model)
        apart = max(float((found[name] - gradient).abs().max()) for name, gradient in wanted.items())
        assert apart < 1e-9 if bptt == 3 else apart > 1e-5
        assert not any(t.requires_grad for _, t in named_tensors(state))


@families(KINDS)
def test_a_session_rewinds_and_stores_the_states(family: Family, tmp_path: Path) -> None:
    model = awaken(family.with_memory(GRC))
    session = Session(model, SEGMENT)
    session.read(words(1, TOKENS + 2))
    mark, fork = session.mark(), session.fork()
    said = session.generate(tokens=SEGMENT + 2, temperature=0).tokens
    session.rewind(mark)
    session.save(tmp_path / "text")
    loaded = Session.load(model, tmp_path / "text", SEGMENT)
    for again in (session, fork, loaded):
        assert torch.equal(again.generate(tokens=SEGMENT + 2, temperature=0).tokens, said)
    other = Session(model, SEGMENT)
    other.read(words(1, TOKENS + 2, seed=3))
    assert differences(other.state, loaded.state) > 1e-4


@families(KINDS)
def test_states_are_as_precise_as_in_the_host(family: Family) -> None:
    model, ids = family.with_memory(GRC).bfloat16(), words(tokens=TOKENS)
    state = model(ids).memory_state
    convolved, recurrent = state.model[0]
    assert {t.dtype for t in convolved} == {torch.bfloat16} and {t.dtype for t in recurrent} <= {torch.float32}
    assert model(ids, memory_state=state).logits.isfinite().all()
    added = add_memory(family.build().bfloat16(), GRC, segment_length=SEGMENT)
    assert added(ids).logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model = family.with_memory(GRC)
        after = model(ids[:, :SEGMENT]).memory_state
        assert {t.dtype for _, t in named_tensors(after.model)} == {torch.float32}
        checks.equal(model(ids[:, SEGMENT:], memory_state=after).logits, model(ids).logits[:, SEGMENT:], 1e-6)


@families(KINDS)
def test_padding_reaches_no_state(family: Family) -> None:
    """NaN in padding neither, and a row without a token keeps its states."""
    model, mask = family.with_memory(GRC).train(), torch.ones(3, TOKENS, dtype=torch.long)
    mask[0, :4] = mask[1] = mask[2, 7:] = 0
    embedded = model.get_input_embeddings()(words(3, TOKENS)).detach()
    before = model(words(3, SEGMENT, seed=2)).memory_state
    embedded = embedded.masked_fill(mask[..., None] == 0, torch.nan)
    out = model(inputs_embeds=embedded, attention_mask=mask, memory_state=before)
    one, same = (map_state(lambda t: t[1:2], state.model) for state in (before, out.memory_state))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named_tensors(one), named_tensors(same), strict=True))
    assert all(t.isfinite().all() for _, t in named_tensors(out.memory_state.model))
    out.logits[mask.bool()].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_hybrid_reads_padded_rows() -> None:
    model, ids = awaken(NAMED["lfm2"].with_memory(GRC)), words(3, SEGMENT)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    out, expected = (m(ids, attention_mask=mask, use_cache=False) for m in (compiled, model))
    checks.equal(out.logits[mask.bool()], expected.logits[mask.bool()])
    assert differences(out.memory_state, expected.memory_state) < 1e-5


def test_memories_that_span_the_layers_are_refused() -> None:
    for name in ("rmt", "armt", "crtn"):
        refuses(rf"'{name}' spans the layers.*recurrent layers", NAMED["lfm2"].with_memory, checks.STREAMS[name])


def test_no_memory_corrects_queries_that_share_a_projection_with_gates() -> None:
    plain = NAMED["qwen3_next"].build()
    refuses("output", add_memory, plain, "delta_mem", segment_length=SEGMENT)
    add_memory(plain, {"name": "delta_mem", "correct": ["output"]}, segment_length=SEGMENT)
    remove_memory(plain)


def test_a_layer_without_a_state_to_continue_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    family = NAMED["lfm2"]
    model = family.build()
    kind = type(model.model.layers[0].conv)
    names = dict(vars(model.model.layers[0]))
    for forward, why in (
        (lambda self, hidden_states, past_key_values=None, **_: hidden_states, "keeps no state"),
        (
            lambda self, hidden_states, past_key_values=None, **_: past_key_values.conv_cache,
            "takes no cache.*conv_cache",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", forward)
            refuses(rf"layers\.0\.conv, a Lfm2ShortConv, {why}", add_memory, model, GRC, segment_length=SEGMENT)
    monkeypatch.setattr(hosts, "_RECURRENT", set())
    refuses(r"layer_types\[0\]='conv'.*register_recurrent", add_memory, model, GRC, segment_length=SEGMENT)
    assert vars(model.model.layers[0]).keys() == names.keys() and "forward" not in vars(model.model.layers[0].conv)


def test_a_mamba_whose_scan_begins_again_is_refused_in_any_precision() -> None:
    """Jamba's reads several tokens from an empty state, whatever came before."""
    jamba = next(family for family in WITHOUT if family.name == "jamba")
    for dtype in (torch.float32, torch.bfloat16):
        model = jamba.build().to(dtype)
        refuses(r"JambaMambaMixer, does not continue", add_memory, model, GRC, segment_length=SEGMENT)


class Call(nn.Module):
    """A call for torch.export."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        out = self.model(ids, attention_mask=mask, memory_state=state, use_cache=False)
        return out.logits, out.memory_state


@torch.no_grad()
def test_an_exported_hybrid_takes_no_padding() -> None:
    model, ids = awaken(NAMED["lfm2"].with_memory(GRC)), words(tokens=SEGMENT)
    given = ids, model(words()).memory_state
    logits, after = torch.export.export(Call(model), (*given, None), strict=False).module()(*given, None)
    expected = model(ids, memory_state=given[1])
    checks.equal(logits, expected.logits)
    assert differences(after, expected.memory_state) < 1e-5
    export = (torch.export.export, Call(model), (*given, torch.ones_like(ids)))
    refuses("attention_mask: recurrent layers", *export, strict=False)


def test_a_call_past_the_state_is_refused() -> None:
    model = NAMED["lfm2"].with_memory(GRC)
    layer = model.model.layers[0].conv
    refuses("Lfm2ShortConv, was called without its state", layer, torch.randn(1, 2, 32))
    refuses("recurrent layers", export_cache, model, model(words()).memory_state)
    layer.forward = lambda hidden_states, **_: hidden_states
    refuses("Lfm2ShortConv, had no part", model, words())
