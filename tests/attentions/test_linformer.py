"""Linformer against loops over slots and places, and its ways of sharing."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from attentions.agreement import agree, inputs, tail
from attentions.dense import padding_last
from common import refuses
from torch import Tensor

from cached_transformers import create_model
from cached_transformers.attentions import create_attention
from cached_transformers.attentions.linformer import LinformerAttention, share_layers
from cached_transformers.interfaces.memory import Context

SHARING = ("none", "heads", "keys_values")


def make(**options: object) -> LinformerAttention:
    core = create_attention({"name": "linformer", "heads": 2, "length": 24, "slots": 4, **options})  # type: ignore[dict-item]
    assert isinstance(core, LinformerAttention)
    return core.double().eval()


def twin(core: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    """One query at a time, over slots that are summed up place by place."""
    projection = core.projection()
    rows = []
    for b in range(len(q)):
        for h in range(q.shape[1]):
            g = h if core.sharing == "none" else 0
            e, f = projection[0, g], projection[-1, g]
            places = [j for j in range(k.shape[2]) if padding is None or not padding[b, j]]
            slot_k = [sum((e[j, s] * k[b, h, j] for j in places), torch.zeros(k.shape[-1])) for s in range(core.slots)]
            slot_v = [sum((f[j, s] * v[b, h, j] for j in places), torch.zeros(v.shape[-1])) for s in range(core.slots)]
            for i in range(q.shape[2]):
                logits = torch.stack([q[b, h, i] @ key / math.sqrt(q.shape[-1]) for key in slot_k])
                weights = logits.exp() / logits.exp().sum()
                rows.append(sum(w * value for w, value in zip(weights, slot_v, strict=True)))
    return torch.stack(rows).view(*q.shape[:3], -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("padded", [False, True])
def test_loops_over_slots_and_places_give_the_same(sharing: str, padded: bool) -> None:
    core = make(sharing=sharing)
    for tokens, keys in ((1, 1), (3, 3), (9, 9), (2, 7)):
        q, k, v = inputs(tokens, keys)
        padding = tail(2, keys) if padded else None
        got = core(q, k, v, key_padding_mask=padding).out_BHNV
        agree(got, padding_last(partial(twin, core), (q, k, v), padding), [q, k, v, *core.parameters()])


def test_slots_and_a_memory_share_one_softmax() -> None:
    core = make(sharing="keys_values")
    q, k, v = inputs(9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1] = True
    context = Context(torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 5), torch.zeros(2, 5, 1), torch.rand(2, 5) < 0.6)
    context = Context(*(t.double() for t in context[:2]), *context[2:])
    got = core(q, k, v, key_padding_mask=padding, context=context, want_lse=True)
    projection = core.projection()[0, 0, :9]
    slot_k, slot_v = (torch.einsum("ns,bhne->bhse", projection, t) for t in (k, v))
    seen = torch.cat([torch.tensor([[True], [False]]).expand(2, 4), context.valid_BM], 1)
    logits = q @ torch.cat([slot_k, context.k_BHME], 2).mT / math.sqrt(6)
    logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    agree(got.out_BHNV, logits.softmax(-1) @ torch.cat([slot_v, context.v_BHME], 2), [q, k, v, *core.parameters()])
    agree(got.lse_BHN, logits.logsumexp(-1), [q, k])


def test_new_projections_keep_lengths_and_inputs_must_fit() -> None:
    """Entries of N(0, 1 / S): the squared length of a projected vector has the mean of the vector's own."""
    core = make(length=256, slots=64, sharing="none")
    assert core.projection_PGLS is not None
    lengths = torch.einsum("pgls,l->pgs", core.projection_PGLS, torch.full((256,), 1 / 16.0).double()).square().sum(-1)
    assert (lengths - 1).abs().max() < 0.6  # 4 sums of 64 squares: a standard deviation of 0.18 each
    refuses(r"25.*length=24", make(), *inputs(25))
    refuses(r"3.*heads=2", make(sharing="none"), *inputs(4, heads=3))


def test_layers_share_one_projection() -> None:
    def model(sharing: str = "keys_values") -> torch.nn.Module:
        torch.manual_seed(0)
        attention = {"name": "linformer", "slots": 4, "sharing": sharing}
        sizes = {"width": 8, "depth": 3, "heads": 2, "classes": 3, "max_length": 12, "vocabulary": 7}
        return create_model("sequence_classifier", attention=attention, **sizes)

    shared = model()
    before = sum(p.numel() for p in shared.parameters())
    assert share_layers(shared) == 3
    assert sum(p.numel() for p in shared.parameters()) == before - 2 * next(
        p.numel() for n, p in shared.named_parameters() if n.endswith("projection_PGLS")
    )
    tokens = torch.randint(7, (2, 12))
    twin = copy.deepcopy(shared)
    cores = [m for m in twin.modules() if isinstance(m, LinformerAttention)]
    assert all(core.projection() is cores[0].projection_PGLS for core in cores)  # the copy's own, not the original's
    alike = model()
    for core in (m for m in alike.modules() if isinstance(m, LinformerAttention)):
        core.projection_PGLS.data.copy_(cores[0].projection())  # type: ignore[union-attr]
    for each in (shared, twin, alike):
        each.eval()
    torch.testing.assert_close(twin(tokens), shared(tokens))
    torch.testing.assert_close(alike(tokens), shared(tokens))
    twin.load_state_dict(shared.state_dict())
    refuses("'keys_values'", share_layers, model("heads"))
    refuses("no linformer layer", share_layers, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"24,.*24,"):
        options = {"sharing": "keys_values"}
        share_layers(torch.nn.ModuleList([make(**options), make(slots=5, **options)]))


@pytest.mark.parametrize(("memory", "more"), [("memory_transformer", 4), ("rmt", 4), ("grc", 0)])
def test_tokens_of_a_memory_have_places_too(memory: str, more: int) -> None:
    spec = {"name": memory, "length": 4} if more else memory
    sizes = {"width": 8, "depth": 1, "heads": 2, "classes": 3, "max_length": 12, "vocabulary": 7}
    model = create_model("sequence_classifier", attention="linformer", memory=spec, **sizes)
    (core,) = (m for m in model.modules() if isinstance(m, LinformerAttention))
    assert core.length == 12 + 1 + more  # and the class token
    assert model(torch.randint(7, (2, 12))).outputs.isfinite().all()
