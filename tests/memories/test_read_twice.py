"""ReadTwice: a slow twin, a case computed by hand, what each read sees, and where gradients go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from memories import harness
from memories.harness import HEADS, VOCABULARY, WIDTH, agree
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Tokens
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.read_twice import ReadTwice, SideAttention, SideAttentionOnce
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions

ROWS, BLOCK, BLOCKS = 2, 4, 3
DOCUMENT: dict[str, Any] = {"scope": "document"}


def build(memory: dict[str, Any] | None, **options: Any) -> Any:
    return harness.build(None if memory is None else {"name": "read_twice", "slots": 6, **memory}, **options)


def tokens(blocks: int = BLOCKS, seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, blocks * BLOCK), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, inputs_BN: Tensor, *, passes: int = 2, length: int = BLOCK, **given: Any) -> Tensor:
    """(B, N, V): what the model says in the last pass."""
    said: list[Tensor] = []
    handle = model.head.register_forward_hook(lambda _m, _i, y: said.append(y))
    SegmentLoop(model, length, bptt=99, passes=passes)(inputs_BN, inputs_BN, **given)
    handle.remove()
    return torch.cat(said[-(len(said) // passes) :], 1)


def plain(model: Any) -> Any:
    """The same weights without a memory."""
    other = build(None)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if k in other.state_dict()})
    return other


def side_twin(side: SideAttention, x_ND: Tensor, table: list[tuple[int, Tensor]], number: int) -> Tensor:
    """Token by token, head by head; `table` holds (number of the block, summary)."""
    out = []
    for x_D in x_ND:
        q_HE = side.query(x_D if isinstance(side, SideAttentionOnce) else side.norm(x_D)).view(side.heads, -1)
        heads = []
        for h in range(side.heads):
            scores, values = [], []
            for place, summary_D in table:
                k_D, v_D = side.key_value(summary_D).chunk(2)
                score = q_HE[h] @ k_D.view(side.heads, -1)[h]
                if side.clip is not None:
                    score = score + side.place_bias[h, max(-side.clip, min(side.clip, place - number)) + side.clip]
                scores.append(score)
                values.append(v_D.view(side.heads, -1)[h])
            best = sorted(range(len(scores)), key=lambda i: -scores[i].item())[: side.top_k or len(scores)]
            root = math.sqrt(q_HE.shape[1])
            weights = [torch.exp(scores[i] / root) for i in best]
            total = torch.exp(q_HE[h] @ side.nothing_HE[h] / root) + sum(weights)
            heads.append(sum((w / total * values[i] for w, i in zip(weights, best, strict=True)), 0 * q_HE[h]))
        out.append(side.output(torch.cat(heads)))
    return torch.stack(out)


def summaries_twin(memory: ReadTwice, h_ND: Tensor, number: int) -> list[Tensor]:
    """Span by span."""
    h_ND = memory.norm(h_ND)
    out = []
    for span in h_ND.split(memory.every or len(h_ND)):
        if memory.summary == "ends":
            s_D = memory.ends(torch.cat([span[0], span[-1]]))
        else:
            s_D = span[-1] if memory.summary == "cls" else sum(span) / len(span)
        if memory.tanh is not None:
            s_D = torch.tanh(memory.tanh(s_D))
        if memory.place is not None:
            s_D = memory.place_norm(s_D + memory.place.weight[number])
        out.append(s_D)
    return out


def read_twin(
    model: Any, ids_N: Tensor, start: int, table: list[tuple[int, Tensor]], number: int, first: bool = False
) -> Tensor:
    """Outputs (N, D) of the last block, or the last one of the first read, for one block of one row."""
    x_BND = model.embedding(ids_N)[None]
    positions_BNP = torch.arange(start, start + len(ids_N))[None, :, None]
    layers = list(model.stack.blocks)
    for block in layers[: model.stack.model_memory.first_layers] if first else layers:
        if isinstance(block.slot_attention, SideAttentionOnce):
            side = block.slot_attention
            x_BND = side.norm(x_BND + side_twin(side, x_BND[0], table, number)[None])
        x_BND = x_BND + block.attention(x_BND, positions_BNP).y_BND
        if type(block.slot_attention) is SideAttention:
            x_BND = x_BND + side_twin(block.slot_attention, x_BND[0], table, number)[None]
        x_BND = x_BND + block.feed_forward(x_BND)
    return x_BND[0]


def twin(model: Any, inputs_BN: Tensor, lengths: list[int]) -> list[Tensor]:
    """Logits of the second read of each row's first tokens, (N, V) a row."""
    memory = model.stack.model_memory
    out = []
    for ids_N, length in zip(inputs_BN, lengths, strict=True):
        blocks = ids_N[:length].split(BLOCK)
        table: list[tuple[int, Tensor]] = []
        for number, block in enumerate(blocks):
            known = table if memory.first_read == "running" else []
            h_ND = read_twin(model, block, number * BLOCK, known, number, first=True)
            for summary_D in summaries_twin(memory, h_ND, number):
                table = [*table, (number, summary_D)]
        table = table[-memory.slots :]
        sees = {
            "document": lambda place, number: True,
            "others": lambda place, number: place != number,
            "earlier": lambda place, number: place < number,
        }[memory.scope]
        said = []
        for number, block in enumerate(blocks):
            visible = [(place, s) for place, s in table if sees(place, number)]
            said.append(model.head(model.stack.norm(read_twin(model, block, number * BLOCK, visible, number))))
        out.append(torch.cat(said))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"first_read": "plain"},
        {"scope": "document", "summary": "mean", "after": "tanh"},
        {"scope": "document", "summary": "ends", "every": 3, "clip": 1},
        {"scope": "others", "after": "place", "top_k": 1, "layer": -1},
        {"scope": "document", "summary": "mean", "every": 2, "top_k": 2, "clip": 2, "layer": 0},
        {"scope": "document", "summary": "mean", "every": 2, "top_k": 3, "clip": 2, "new_layers": 1},
        {"first_read": "plain", "new_layers": 1},
    ],
)
def test_values_and_gradients_are_those_of_loops(options: dict[str, Any]) -> None:
    """Two rows; the second document is two tokens shorter than the first."""
    model, inputs = build(options), tokens()
    lengths = [BLOCKS * BLOCK, BLOCKS * BLOCK - 2]
    padding = torch.arange(BLOCKS * BLOCK) >= torch.tensor(lengths)[:, None]
    got = [row[:n] for row, n in zip(logits(model, inputs, padding=padding), lengths, strict=True)]
    agree(got, twin(model, inputs, lengths), model)


@pytest.mark.parametrize("options", [DOCUMENT, {"scope": "others"}, {"first_read": "plain"}])
@pytest.mark.parametrize("attention", ["side", "joint"])
def test_a_first_read_is_that_of_a_model_without_memory(options: dict[str, Any], attention: str) -> None:
    model, inputs = build({**options, "attention": attention}), tokens()
    once, twice = logits(model, inputs, passes=1), logits(model, inputs)
    torch.testing.assert_close(once, logits(plain(model), inputs, passes=1), rtol=0, atol=1e-12)
    first = twice[:, :BLOCK] - once[:, :BLOCK]
    assert (twice - once)[:, BLOCK:].abs().max() > 1e-3
    assert (first.abs().max() > 1e-3) == ("scope" in options)  # before the first block there is nothing to see


@pytest.mark.parametrize("attention", ["side", "joint"])
@pytest.mark.parametrize(
    ("scope", "seen"), [("document", [0, 1, 2]), ("others", [0, 1, 2]), ("earlier", [1, 2]), (None, [1, 2])]
)
def test_which_blocks_hear_of_a_change(scope: str | None, seen: list[int], attention: str) -> None:
    """The first token of the first or last block is changed: who hears of it in the second read?"""
    model, inputs = build({"scope": scope, "attention": attention}), tokens()
    before = logits(model, inputs)
    for place, hears in ((0, [0, *seen]), (2 * BLOCK, [0, 1, 2] if scope in ("document", "others") else [2])):
        changed = inputs.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCABULARY
        difference = (logits(model, changed) - before).abs().amax((0, 2)).view(BLOCKS, BLOCK).amax(1)
        assert [i for i in range(BLOCKS) if difference[i] > 1e-9] == sorted(set(hears))


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_row_that_is_reset_has_left_its_document(passes: int) -> None:
    model, inputs = build({"first_read": "plain"} if passes > 1 else {}), tokens()
    loop = SegmentLoop(model, BLOCK, bptt=99, passes=passes)
    _, state = loop(tokens(seed=5), tokens(seed=5))
    rows = torch.tensor([True, False])
    got = logits(model, inputs, passes=passes, state=state, reset=rows)
    torch.testing.assert_close(got[0], logits(model, inputs, passes=passes)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], logits(model, inputs, passes=passes, state=state)[1], rtol=0, atol=1e-12)
    assert (got[1] - logits(model, inputs, passes=passes)[1]).abs().max() > 1e-3


def test_blocks_without_places_may_be_read_in_any_order() -> None:
    model, inputs = build(DOCUMENT, positions="none"), tokens()
    order = torch.tensor([2, 0, 1])

    def mixed(t: Tensor) -> Tensor:
        return t.unflatten(1, (BLOCKS, BLOCK))[:, order].flatten(1, 2)

    torch.testing.assert_close(logits(model, mixed(inputs)), mixed(logits(model, inputs)), rtol=0, atol=1e-12)
    placed = build({**DOCUMENT, "clip": 2}, positions="none")
    assert (logits(placed, mixed(inputs)) - mixed(logits(placed, inputs))).abs().max() > 1e-4


def test_blocks_inside_a_segment_are_the_segments_of_that_length() -> None:
    inputs = tokens()
    whole = build({**DOCUMENT, "block_length": BLOCK})
    torch.testing.assert_close(
        logits(whole, inputs, length=BLOCKS * BLOCK), logits(build(DOCUMENT), inputs), rtol=0, atol=1e-12
    )


def test_a_document_may_go_on_in_another_batch() -> None:
    """The second batch's passes begin where it began: the table has both, the clock counts each token once."""
    model = build(DOCUMENT)
    loop = SegmentLoop(model, BLOCK, bptt=99, passes=2)
    _, state = loop(tokens(2), tokens(2))
    assert state.clock_B.tolist() == [2 * BLOCK] * ROWS and state.model.blocks_B.tolist() == [2] * ROWS
    _, state = loop(tokens(3, 1), tokens(3, 1), state)
    assert state.clock_B.tolist() == [5 * BLOCK] * ROWS and state.model.blocks_B.tolist() == [5] * ROWS
    numbers, begins = (state.model.table.positions_BMP[0, 1:, i].tolist() for i in (1, 0))
    assert numbers == [0, 1, 2, 3, 4] and begins == [BLOCK * n for n in numbers]
    assert state.model.table.count_B.tolist() == [5] * ROWS


def test_the_oldest_summaries_leave_a_full_table() -> None:
    small, large = build({**DOCUMENT, "slots": 3, "clip": 2}), build({**DOCUMENT, "slots": 8, "clip": 2})
    inputs = tokens(5)
    _, state = SegmentLoop(small, BLOCK, bptt=99, passes=2)(inputs, inputs)
    _, wide = SegmentLoop(large, BLOCK, bptt=99, passes=2)(inputs, inputs)
    assert state.model.table.positions_BMP[0, :, 1].tolist() == [2, 3, 4] and state.model.blocks_B.tolist() == [5, 5]
    torch.testing.assert_close(state.model.table.hidden_BMD, wide.model.table.hidden_BMD[:, -3:], rtol=0, atol=1e-12)
    memory = small.stack.model_memory
    for number, place in ((0, [1, 2, 3]), (1, [1, 2, 3]), (2, [0, 1, 2]), (4, [-2, -1, 0]), (5, [-3, -2, -1])):
        positions = torch.full((ROWS, BLOCK, 1), number * BLOCK)
        slots = memory.open(state.model, Tokens(torch.zeros(ROWS, BLOCK, WIDTH), positions), []).slots
        assert slots is not None and slots[2][0].tolist() == place


def test_the_joint_form_appends_the_summaries_to_the_keys_of_each_layer() -> None:
    """A second read of block 0 equals one pass of attention over [summaries, block]."""
    model, inputs = build({**DOCUMENT, "attention": "joint"}, positions="none"), tokens()
    _, state = SegmentLoop(model, BLOCK, bptt=99, passes=2)(inputs, inputs)
    table_BMD = state.model.table.hidden_BMD[:, -BLOCKS:]
    x_BND = model.embedding(inputs[:, :BLOCK])
    for block in model.stack.blocks:
        attention = block.attention
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in attention.qkv(attention.norm(torch.cat([table_BMD, x_BND], 1))).chunk(3, -1)
        )
        mask = torch.ones(BLOCK, BLOCKS + BLOCK).tril(BLOCKS).bool()
        y = F.scaled_dot_product_attention(q[:, :, BLOCKS:], k, v, attn_mask=mask)
        x_BND = x_BND + attention.output(y.transpose(1, 2).flatten(2))
        x_BND = x_BND + block.feed_forward(x_BND)
    want = model.head(model.stack.norm(x_BND))
    torch.testing.assert_close(logits(model, inputs)[:, :BLOCK], want, rtol=0, atol=1e-10)


def test_a_bidirectional_stack_sees_the_document_by_default() -> None:
    spec = {"name": "read_twice", "slots": 4, "after": "tanh"}
    stack = make_stack(StackOptions(WIDTH, 2, HEADS, 12, memory=spec), fallback="rotary").double().eval()
    memory = stack.model_memory
    assert isinstance(memory, ReadTwice) and (memory.scope, memory.first_read) == ("document", "plain")
    x = torch.randn(ROWS, 2 * BLOCK, WIDTH).double()
    blocks = x.split(BLOCK, 1)
    state = stack.init_state(ROWS)
    first = []
    for block in blocks:
        first.append(stack(block, state))
        state = first[-1].state
    summary = torch.tanh(memory.tanh(memory.norm(h_of(stack, blocks[0])[:, 0])))  # of the first token
    torch.testing.assert_close(state.model.table.hidden_BMD[:, -2], summary, rtol=0, atol=1e-10)
    again = stack.init_state(ROWS)._replace(model=state.model)
    second = stack(blocks[0], again).outputs
    assert (second - first[0].outputs).abs().max() > 1e-4
    state = stack(blocks[1], stack(blocks[0], stack.init_state(ROWS)).state).state
    other = stack.init_state(ROWS)._replace(model=state.model)
    torch.testing.assert_close(stack(blocks[0], other).outputs, second, rtol=0, atol=1e-12)


def h_of(stack: Any, x_BND: Tensor) -> Tensor:
    positions = torch.arange(x_BND.shape[1])[None, :, None].expand(len(x_BND), -1, -1)
    for block in stack.blocks:
        x_BND = block(x_BND, positions)[0]
    return x_BND


def reached(model: Any, bptt: int, passes: int = 2) -> dict[int, list[int]]:
    """For the loss of each block in the last pass: the blocks of the first read that get a gradient, row 0."""
    inputs, found = tokens(), {}
    for asked in range(BLOCKS):
        targets = torch.full_like(inputs, -100)
        targets[0, asked * BLOCK : (asked + 1) * BLOCK] = inputs[0, asked * BLOCK : (asked + 1) * BLOCK]
        embedded: list[Tensor] = []
        handle = model.embedding.register_forward_hook(
            lambda _m, _i, y, embedded=embedded: (y.retain_grad(), embedded.append(y))[1]
        )
        SegmentLoop(model, BLOCK, bptt=bptt, passes=passes)(inputs, targets)[0].backward()
        handle.remove()
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in embedded]
        assert all(g[1].abs().max() == 0 for g in grads), "another document was reached"
        found[asked] = [i for i, g in enumerate(grads[:BLOCKS]) if g.abs().max() > 1e-12]
    return found


def test_a_loss_reaches_the_first_read_of_all_it_sees_within_the_window() -> None:
    assert reached(build(DOCUMENT), bptt=BLOCKS) == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}
    assert reached(build({"scope": "others"}), bptt=BLOCKS) == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert reached(build({"first_read": "plain"}), bptt=BLOCKS) == {0: [], 1: [0], 2: [0, 1]}
    assert reached(build(DOCUMENT), bptt=BLOCKS - 1) == {0: [], 1: [], 2: []}


def test_what_sees_nothing_reads_exactly_nothing() -> None:
    side = SideAttention(WIDTH, HEADS, top_k=None, clip=2).double()
    x, slots = torch.randn(ROWS, 5, WIDTH).double(), torch.randn(ROWS, 4, WIDTH).double()
    valid, places = torch.tensor([[True, True, False, True], [False] * 4]), torch.arange(4).expand(ROWS, -1)
    y = side(x, slots, valid, places)
    assert y[0].abs().min() > 0 and y[1].abs().max() == 0
    nn.init.constant_(side.nothing_HE, 1e4)
    nn.init.constant_(side.query.weight, 0), nn.init.constant_(side.query.bias, 1)
    assert side(x, slots, valid, places).abs().max() == 0  # and so does what prefers the no-op key
