"""Packed rows: the plan of pieces, segment loops, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import TORCH, refuses, stirred
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models import documents
from cached_transformers.models.documents import check_documents, plan_documents
from cached_transformers.models.documents import document_ids_from_cu_seqlens as from_bounds
from cached_transformers.models.documents import document_ids_from_position_ids as from_places
from cached_transformers.models.generation import generate

SEGMENT, VOCABULARY = 5, 11
RMT = {"name": "rmt", "length": 2}
XL = {"name": "transformer_xl", "length": 4}
COMPRESSIVE = {"name": "compressive", "length": 2, "compressed": 2, "rate": 2}


def ids(*rows: tuple[int, ...]) -> Tensor:
    """Ids of rows with documents of these lengths; a negative number is padding."""
    lay = [[(7 * i if n > 0 else -3) for i, n in enumerate(row) for _ in range(abs(n))] for row in rows]
    return torch.tensor(lay)


PACKED = ids((5, 1, -2, 8), (16,), (-1, 3, 11, 1))
"""Segments of five tokens, and a short one."""


def build(memory: Any = RMT, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocabulary": VOCABULARY, "width": 8, "depth": 2, "heads": 2, "feed_forward": 16, "positions": "rotary"}
    model = create_model("language_model", memory=memory, **{**sizes, **options}).double()
    return stirred(model, 0.2)


def text(documents_BN: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that are no token of another document."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BN = torch.randint(0, VOCABULARY, (len(documents_BN), documents_BN.shape[1] + 1), generator=generator)
    last_BN = documents_BN != documents_BN.roll(-1, 1)
    last_BN[:, -1] = False
    return tokens_BN[:, :-1], tokens_BN[:, 1:].masked_fill(last_BN, -100)


def apart(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each document of `PACKED` in a row of its own, in the same columns, with padding elsewhere."""
    pieces = [(row, int(i)) for row, found in enumerate(PACKED) for i in found.unique() if i >= 0]
    rows = torch.tensor([row for row, _ in pieces])
    padding = PACKED[rows] != torch.tensor([i for _, i in pieces])[:, None]
    return *(t[rows] for t in tensors), padding


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


LOOPS = [
    pytest.param(SegmentLoop, {"bptt": 1}, id="one"),
    pytest.param(SegmentLoop, {"bptt": 2}, id="blocks"),
    pytest.param(SegmentLoop, {"bptt": 2, "bptt_window": "sliding"}, id="sliding"),
    pytest.param(ReplayLoop, {"bptt": 4}, id="replay"),
    pytest.param(ReplayLoop, {"bptt": 2, "bptt_window": "sliding"}, id="replay_sliding"),
]


@pytest.mark.parametrize("memory", [RMT, XL], ids=["rmt", "transformer_xl"])
@pytest.mark.parametrize(("kind", "options"), LOOPS)
def test_loops_read_packed_documents_as_rows_of_their_own(kind: Any, options: dict[str, Any], memory: Any) -> None:
    model = build(memory)
    inputs, targets = text(PACKED)
    loop = kind(model, SEGMENT, **options)
    loss, state = loop(inputs, targets, documents=PACKED)
    alone, answers, padding = apart(inputs, targets)
    want, others = loop(alone, answers, padding=padding)
    torch.testing.assert_close(loss, want, rtol=0, atol=1e-12)
    same(state, states.reorder(others, torch.tensor([2, 3, 6])))
    same(gradients(model, loss), gradients(model, want))


def test_a_row_goes_on_with_its_state_unless_it_is_reset() -> None:
    model = build().eval()
    before = SegmentLoop(model, SEGMENT)(*text(PACKED, seed=5))[1]
    inputs, targets = text(PACKED)
    loop = SegmentLoop(model, SEGMENT)
    reset = torch.tensor([False, True, False])
    got, state = loop(inputs, targets, before, reset, documents=PACKED)
    alone, answers, padding = apart(inputs, targets)
    firsts = torch.tensor([0, 3, 4])  # the first document of each row
    given = model.init_state(7)
    fresh = torch.ones(7, dtype=torch.bool)
    fresh[firsts[~reset]] = False
    given = states.reset(states.reorder(before, torch.tensor([0, 0, 0, 1, 2, 2, 2])), given, fresh)
    want, others = loop(alone, answers, given, padding=padding)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    same(state, states.reorder(others, torch.tensor([2, 3, 6])))
    assert got != loop(inputs, targets, before, documents=PACKED)[0]
    assert got != loop(inputs, targets, before, reset)[0]


def test_a_row_without_a_token_and_values_of_padding_change_nothing() -> None:
    model = build().eval()
    inputs, _ = text(PACKED)
    before = model(inputs[:, :5]).state
    found = model(inputs[:, :5], before, documents=ids((2, 3), (-5,), (5,)))
    kept, was = (states.map_state(lambda t: t[1], state) for state in (found.state, before))
    torch.testing.assert_close(kept, was, rtol=0, atol=0)
    assert not torch.equal(found.state.model[0][0], before.model[0][0])
    assert (found.outputs[1] == 0).all()
    model = build().eval()
    inputs, targets = text(PACKED)
    other = torch.where(PACKED < 0, (inputs + 3) % VOCABULARY, inputs)
    mixed = torch.where(PACKED < 0, -100, targets)
    loop = SegmentLoop(model, SEGMENT)
    assert loop(inputs, targets, documents=PACKED)[0] == loop(other, mixed, documents=PACKED)[0]
    positive = PACKED.masked_fill(PACKED < 0, 99)  # padding that the mask alone tells
    assert loop(inputs, targets, padding=PACKED < 0, documents=positive)[0] == loop(inputs, mixed, documents=PACKED)[0]


def test_auxiliary_losses_are_weighed_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CALL", 0)
    model = build(COMPRESSIVE)
    packed = ids((6, 2), (6, 2))
    inputs, _ = text(packed)
    state = model(inputs).state  # so that there is something to compress
    state = states.reorder(state, torch.tensor([0, 0]))
    found = model(inputs, state, documents=packed)
    longer = model(inputs[:, :6], state).auxiliary_loss
    shorter = model(inputs[:, 6:]).auxiliary_loss
    assert longer > 0
    torch.testing.assert_close(found.auxiliary_loss, longer * 0.75 + shorter * 0.25, rtol=0, atol=1e-12)


def test_documents_that_begin_with_segments_are_read_along_diagonals() -> None:
    model = build({"name": "infini"})
    laid = ids((5, 5, 6), (10, 6), (16,), (5, 8, -3))
    inputs, targets = text(laid)
    plain, state = SegmentLoop(model, SEGMENT, bptt=4)(inputs, targets, documents=laid)
    along, other = SegmentLoop(model, SEGMENT, bptt=4, schedule="diagonal")(inputs, targets, documents=laid)
    torch.testing.assert_close(along, plain, rtol=0, atol=1e-9)
    same(other, state)
    with pytest.raises(ValueError, match="schedule='diagonal'"):
        SegmentLoop(model, SEGMENT, schedule="diagonal")(inputs, targets, documents=ids(*[(7, 9)] * 4))


def test_rows_of_one_document_are_read_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_documents(ids((5,), (3, -2), (-5,))) is None
    for packed in (ids((2, 3)), ids((-1, 4)), ids((2, -1, 2))):
        assert plan_documents(packed) is not None
    model = build().eval()
    inputs, _ = text(PACKED)
    calls: list[int] = []
    model.stack.register_forward_hook(lambda *_: calls.append(1))
    plain = model(inputs).outputs
    assert torch.equal(model(inputs, documents=torch.full(inputs.shape, 4)).outputs, plain)
    assert len(calls) == 2
    model(inputs, documents=PACKED)
    assert len(calls) == 3
    monkeypatch.setattr(documents, "CALL", 0)
    model(inputs, documents=PACKED)  # of 16, of 11 and 8, of 5 and 3, and twice of 1
    assert len(calls) == 3 + 4


@pytest.mark.parametrize("call", [0, 64])
def test_fewer_than_twice_the_tokens_are_computed(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CALL", call)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows, columns = (int(torch.randint(1, most, (), generator=generator)) for most in (6, 40))
        begins = torch.rand(rows, columns, generator=generator) < 0.2
        padding = torch.rand(rows, columns, generator=generator) < 0.1
        packed = begins.long().cumsum(1).masked_fill(padding, -1)
        plan = plan_documents(packed)
        if plan is None:
            continue
        tokens = int((packed >= 0).sum())
        longest = plan.groups[0].places_Pn.shape[1]
        saved = longest.bit_length() - len(plan.groups)
        assert saved >= 0
        assert sum(group.tokens for group in plan.groups) == tokens <= plan.computed < 2 * tokens + call * saved
        taken = torch.cat([group.places_Pn.flatten().unique() for group in plan.groups])
        assert taken.sort().values.equal((packed >= 0).flatten().nonzero()[:, 0])


def test_ids_of_bounds_and_places_and_documents_that_begin_again() -> None:
    bounds = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert from_bounds(bounds).tolist() == [[0, 0, 0, 2, 2]]
    assert from_bounds(bounds, 7).tolist() == [[0, 0, 0, 2, 2, -1, -1]]
    places = torch.tensor([[4, 5, 0, 1, 0, 0], [9, 0, 1, 9, 2, 0]])
    padding = torch.tensor([[0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]]).bool()
    assert from_places(places, padding).tolist() == [[0, 0, 1, 1, 2, 3], [-1, 0, 0, -1, 0, 1]]
    laid = ids((5, 5, 5))
    laid[0, 10:] = 0
    with pytest.raises(ValueError, match=r"documents\[0, 10\] is 0, a document that has ended"):
        SegmentLoop(build(), SEGMENT)(*text(laid), documents=laid)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_bounds(torch.zeros(1, 2).long()), r"cu_seqlens of shape \(1, 2\)"),
        (lambda: from_bounds(torch.tensor([0.0, 2.0])), "cu_seqlens of shape .*torch.float32"),
        (lambda: from_bounds(torch.tensor([1, 2])), r"cu_seqlens=\[1, 2\] must begin with 0"),
        (lambda: from_bounds(torch.tensor([0, 3, 2])), "never fall"),
        (lambda: from_bounds(torch.tensor([0, 3]), 2), "cu_seqlens end at 3, tokens=2"),
        (lambda: from_places(torch.zeros(3).long()), r"position_ids of shape \(3,\)"),
        (lambda: from_places(torch.zeros(1, 3).long(), torch.zeros(1, 3)), r"padding of shape \(1, 3\), torch.float32"),
        (lambda: from_places(torch.tensor([[3, 4, 2]])), r"position_ids\[0, 2\] is 2, after 4"),
        (lambda: check_documents(torch.zeros(2, 3).long(), 2, 4), r"documents of shape \(2, 3\) .* \(2, 4\)"),
        (lambda: check_documents(torch.zeros(2, 3), 2, 3), "dtype torch.float32 must be an id for each token"),
        (lambda: plan_documents(torch.tensor([[0, 1], [4, 4]]).repeat(1, 2)), r"documents\[0, 3\] is 1, a document"),
    ],
)
def test_what_are_no_documents_is_refused(make: Any, message: str) -> None:
    refuses(message, make)


def test_what_cannot_be_told_of_documents_says_so() -> None:
    inputs, targets = text(PACKED)
    sizes = {"width": 8, "depth": 1, "heads": 2, "feed_forward": 16}
    classifier = create_model("sequence_classifier", vocabulary=VOCABULARY, classes=3, max_length=16, **sizes)
    refuses("SequenceClassifier", classifier, inputs, documents=PACKED)
    refuses("SequenceClassifier", SegmentLoop(classifier, SEGMENT), inputs, targets, documents=PACKED)
    images = create_model("vision_transformer", image_size=8, patch_size=4, **sizes)
    refuses("VisionTransformer", images, torch.zeros(1, 3, 8, 8), documents=torch.zeros(1, 16))
    pairs = create_model("encoder_decoder", vocabulary=VOCABULARY, max_length=16, **sizes)
    refuses("EncoderDecoder", pairs, inputs, inputs, documents=PACKED)
    refuses("documents", generate, build(), inputs, tokens=1, segment_length=SEGMENT, documents=PACKED)
    refuses("passes=2", SegmentLoop(build(), SEGMENT, passes=2), inputs, targets, documents=PACKED)
    with pytest.raises(ValueError, match=r"outputs of shape \(\d+, 3\) .* answers once for a row"):
        SegmentLoop(Once(), SEGMENT, scoring=lambda model, *_: model())(inputs, targets, documents=PACKED)


class Once(nn.Module):
    """A third-party class."""

    def init_state(self, rows: int) -> Tensor:
        return torch.zeros(rows)

    def forward(self) -> Any:
        return ModelOutput(torch.zeros(4, 3), torch.zeros(4), torch.zeros(()))


def test_a_memory_of_all_rows_is_refused_in_training_and_operations_are_counted() -> None:
    model = build()
    model.stack.blocks[0].attention.memory.shared = True
    model.stack.blocks[0].attention.memory.train()
    inputs, _ = text(PACKED)
    refuses(r"documents: memory .* is one for all rows", model, inputs, documents=PACKED)
    model.eval()(inputs, documents=PACKED)
    model = build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = torch.zeros(2, 6, dtype=torch.long)
        assert model(inputs, documents=inputs).outputs.shape == (2, 6, VOCABULARY)


@pytest.mark.skipif(TORCH < (2, 9), reason="older versions of torch refuse an earlier line")
def test_the_model_inside_may_be_compiled_and_the_loop_not() -> None:
    model = build(None, depth=1).eval()
    inputs, targets = text(PACKED)
    with torch.no_grad():
        want = SegmentLoop(model, 8)(inputs, targets, documents=PACKED)[0]
        inside = torch.compile(model, backend="eager", dynamic=True)
        torch.testing.assert_close(SegmentLoop(inside, 8)(inputs, targets, documents=PACKED)[0], want)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    refuses("documents in a compiled call", whole, inputs, documents=PACKED, raises=Exception)


@pytest.mark.parametrize("kind", [SegmentLoop, ReplayLoop])
def test_the_plan_is_made_where_the_ids_are_and_waits_for_no_device(kind: Any) -> None:
    # A device without values: nothing can be read back from it, and nothing on it meets what is left on the CPU.
    inputs, targets = (t.to("meta") for t in text(PACKED))
    loss, state = kind(build().to("meta"), SEGMENT, bptt=4)(inputs, targets, documents=PACKED)
    loss.backward()
    assert {t.device.type for _, t in states.named_tensors(state)} == {"meta"}


def test_places_go_with_their_tokens() -> None:
    segatron = {"name": "segatron", "length": 4, "sentence_ends": (1,)}
    model = build(segatron, positions=None).eval()
    inputs, targets = text(PACKED)
    places = torch.stack([torch.arange(16) // 3, torch.arange(16) // 6], -1).expand(3, -1, -1)
    loop = SegmentLoop(model, SEGMENT)
    got = loop(inputs, targets, places=places, documents=PACKED)[0]
    alone, answers, numbers, padding = apart(inputs, targets, places)
    torch.testing.assert_close(got, loop(alone, answers, padding=padding, places=numbers)[0], rtol=0, atol=1e-12)
