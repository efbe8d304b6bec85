"""Several documents in a row of GPT-2 and Llama with a memory: packed rows are separate rows, whoever says so and how.

Legend: B rows, M columns of a call.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from common import refuses
from integrations import transformers_hosts as T
from integrations.families import PAD
from integrations.family_checks import KINDS, RECENT, row_of
from integrations.hosts import library
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import ReplayLoop, SegmentLoop, add_memory, create_model, tune_initial_state
from cached_transformers.integrations.transformers.packed_rows import labels_within
from cached_transformers.state import map_state

IDS = torch.tensor(
    [
        [7, 7, 7, 7, 7, 7, 7, 3, 5, 5, 5, 5, 5, 8, 8, 8],  # longer than a segment, one token, a segment, what is left
        [-1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 2, 2, -1],  # padding in front, inside, behind; more than two segments
        [1] * 16,  # one document alone
        [4, 4, 6, 6, 6, -1, -1, -1, 9, 9, 9, 9, 9, 9, -1, -1],  # padding between documents
    ]
)
TOKENS = T.words(*IDS.shape).masked_fill(IDS < 0, PAD)


class Document(NamedTuple):
    """Where one stands: its row, its columns, and whether it is the row's first."""

    row: int
    columns: Tensor
    first: bool


def documents(ids_BM: Tensor = IDS) -> list[Document]:
    """In the order of the rows."""
    found = []
    for row, ids in enumerate(ids_BM):
        names = list(dict.fromkeys(ids[ids >= 0].tolist()))
        found += [Document(row, (ids == name).nonzero()[:, 0], name == names[0]) for name in names]
    return found


def separately(
    model: Any, past: Any, ids_BM: Tensor = IDS, tokens: Tensor = TOKENS
) -> tuple[Tensor, Tensor, list[Any]]:
    """Logits at the places of the packed rows, the loss, and each row's state: every document is called by itself."""
    logits, states = None, [row_of(past, row) for row in range(len(ids_BM))]
    loss, count = torch.zeros(()), 0
    for row, columns, first in documents(ids_BM):
        text = tokens[row : row + 1, columns]
        out = model(text, **({"memory_state": row_of(past, row)} if first else {}))
        logits = out.logits.new_zeros(*ids_BM.shape, out.logits.shape[-1]) if logits is None else logits
        logits = logits.index_put((torch.full_like(columns, row), columns), out.logits[0])
        states[row] = out.memory_state
        loss = loss + F.cross_entropy(out.logits[0, :-1], text[0, 1:], reduction="sum")
        count += len(columns) - 1
    assert logits is not None
    return logits, loss / count, states


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(model: Any, past: Any, close: float = 2e-5, **call: Any) -> Any:
    """Packed rows are separate rows: logits, loss, gradients of all parameters and of the state given, state after."""
    logits, loss, states = separately(model, past)
    expected = gradients(model, loss)
    before = map_state(torch.clone, past)
    out = model(TOKENS, labels=TOKENS, memory_state=past, **call)
    assert T.differences(before, past) == 0
    real = IDS >= 0
    torch.testing.assert_close(out.logits[real], logits[real], rtol=close, atol=close)
    torch.testing.assert_close(out.loss, loss, rtol=close, atol=close)
    for row, state in enumerate(states):
        assert T.differences(row_of(out.memory_state, row), state) < 10 * close
    found = gradients(model, out.loss)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=5 * close, msg=lambda m, n=name: f"{n}: {m}")
    return out


def given(model: Any) -> Any:
    """A state that rows go on with."""
    with torch.no_grad():
        return model(T.words(len(IDS), T.SEGMENT + 2, 5)).memory_state


MEMORIES: dict[str, tuple[T.Architecture, dict[str, Any]]] = {
    **{f"{memory}/{host}": (host, spec) for memory, spec in T.STREAMS.items() for host in T.DECODERS},
    **{name: (T.GPT2 if "gpt2" in name else T.LLAMA, spec) for name, spec in RECENT.items()},
    **{f"{name}/kv": (T.LLAMA, spec) for name, spec in KINDS.items()},
    **{name: (T.LLAMA, {"name": name, "length": 4}) for name in ("tova", "h2o")},
    "streaming_llm of keys": (T.LLAMA, {"name": "streaming_llm", "length": 6, "sinks": 2, "keep": "kv"}),
}


@pytest.mark.parametrize("case", list(MEMORIES))
def test_packed_rows_are_separate_rows(case: str) -> None:
    host, memory = MEMORIES[case]
    model = T.awaken(host.with_memory(memory, segment_length=T.SEGMENT))
    same(model, given(model), document_ids=IDS)


@T.architectures(T.DECODERS)
@pytest.mark.parametrize("length", [2, 7, None])
def test_segments_of_any_length(host: T.Architecture, length: int | None) -> None:
    """None: each document is one segment."""
    model = T.awaken(T.stream(host, "rmt", length))
    same(model, given(model), document_ids=IDS)


def test_every_document_begins_with_the_state_that_was_tuned() -> None:
    """And trains it; a row's first document does where no state is given."""
    model = T.awaken(T.stream(T.LLAMA, "rmt"))
    tuned = tune_initial_state(model, T.words(1, 3 * T.SEGMENT, 9), segment_length=T.SEGMENT)
    same(model, model.init_memory_state(len(IDS)), document_ids=IDS)
    grads = [p.grad.clone() for p in tuned.parameters()]
    gradients(model, model(TOKENS, labels=TOKENS, document_ids=IDS).loss)
    torch.testing.assert_close([p.grad for p in tuned.parameters()], grads)
    assert grads and all(grad.abs().max() > 0 for grad in grads)


PLACES = torch.cat([torch.arange(7), torch.arange(1), torch.arange(5)])[None]
BOUNDS = torch.tensor([0, 7, 8, 13])
NUMBERS = torch.tensor([0] * 7 + [1] + [2] * 5)[None]
TELLERS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": PLACES},
    "position_ids that begin at 2": {"position_ids": PLACES + 2},
    "position_ids beside bounds": {"position_ids": PLACES, "cu_seq_lens_q": BOUNDS, "seq_idx": NUMBERS},
}


@T.architectures(T.DECODERS)
@pytest.mark.parametrize("who", list(TELLERS))
def test_whoever_says_where_documents_begin(host: T.Architecture, who: str) -> None:
    model, ids = T.awaken(T.stream(host, "rmt_causal")), T.words(1, 13)
    expected = model(ids, labels=ids, document_ids=NUMBERS, output_hidden_states=True)
    found = model(ids, labels=ids, output_hidden_states=True, **TELLERS[who])
    if who == "position_ids that begin at 2":  # the host's own places; a row alone is given the same
        alone = model(ids[:, 8:], position_ids=PLACES[:, 8:] + 2)
        torch.testing.assert_close(found.logits[:, 8:], alone.logits, rtol=1e-5, atol=1e-5)
        return
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(a, b)
    assert T.differences(found.memory_state, expected.memory_state) == 0
    inside = model.base_model(ids, **TELLERS[who])
    torch.testing.assert_close(inside.last_hidden_state, found.hidden_states[-1])


def test_places_that_begin_again_behind_padding() -> None:
    """A collator that pads packed rows, and says so by a mask alone."""
    model = T.awaken(T.stream(T.LLAMA, "rmt"))
    mask = (IDS >= 0).long()
    places = torch.zeros_like(IDS)
    for row, columns, _ in documents():
        places[row, columns] = torch.arange(len(columns))
    same(model, given(model), position_ids=places, attention_mask=mask)


def test_one_document_in_each_row_is_the_row() -> None:
    """With what an ordinary call may ask for, keys and values among it."""
    model, ids = T.awaken(T.stream(T.GPT2, "rmt")), T.words(2, 9)
    told = torch.tensor([[4] * 9, [-1, -1, 5, 5, 5, 5, 5, 5, -1]])
    mask = (told >= 0).long()
    a = model(ids, document_ids=told, use_cache=True)
    b = model(ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(a.logits[mask.bool()], b.logits[mask.bool()])
    assert T.differences(a.past_key_values.memory_state, b.past_key_values.memory_state) < 1e-6


def test_labels_ask_each_token_for_the_next_one_of_its_document() -> None:
    labels = torch.arange(100, 100 + IDS.numel()).view(IDS.shape)
    found, expected = labels_within(labels, IDS), torch.full_like(IDS, -100)
    for row, columns, _ in documents():
        for before, here in pairwise(columns):
            expected[row, before + 1] = labels[row, here]
    assert torch.equal(found, expected)


def test_labels_that_somebody_shifted_lose_what_crosses() -> None:
    model, ids = T.awaken(T.stream(T.LLAMA, "rmt")), T.words(1, 13)
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    loss = model(ids, labels=ids, document_ids=NUMBERS).loss
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted, document_ids=NUMBERS).loss, loss)


def test_an_answer_for_each_token_takes_its_labels_as_they_are() -> None:
    torch.manual_seed(0)
    model = add_memory(T.LLAMA.build("LlamaForTokenClassification"), T.STREAMS["rmt"], segment_length=T.SEGMENT)
    ids = T.words(1, 13)
    out = model(ids, labels=ids % 2, position_ids=PLACES)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0], ids[0] % 2))


@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering"])
def test_a_head_that_answers_for_a_row_is_refused(head: str) -> None:
    model = add_memory(T.LLAMA.build(f"LlamaFor{head}"), T.STREAMS["rmt"], segment_length=T.SEGMENT)
    refuses(rf"LlamaFor{head} answers once for a row.*a row of its own", model, T.words(1, 13), position_ids=PLACES)


TEXTS = [T.words(1, count, count)[0].tolist() for count in (7, 1, 5, 12, 3, 9, 6, 2)]


@pytest.mark.parametrize("host, memory", [(T.GPT2, "rmt"), (T.LLAMA, "grc_stream")], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}], ids=["", "all"])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_flattened_batches_train_as_padded_ones(
    host: T.Architecture, memory: str, keywords: dict[str, bool], tmp_path: Path
) -> None:
    transformers = library("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")

    def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows])
        mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100  # which is no target, though Trainer counts it among those of GPT-2
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    collators = (padded, transformers.DataCollatorWithFlattening(**keywords))
    trained = []
    for collator in collators:
        model = T.awaken(T.stream(host, memory))
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        options |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(str(tmp_path / "run"), max_steps=2, optim="sgd", **options)
        rows = [{"input_ids": text} for text in TEXTS]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
        trainer.train()
        losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
        trained.append((losses, model.state_dict()))
        if collator is not padded:
            assert trainer.evaluate()["eval_loss"] > 0
    (padded_losses, a), (losses, b) = trained
    assert losses == pytest.approx(padded_losses, rel=1e-4) and a.keys() == b.keys()
    fresh = T.awaken(T.stream(host, memory)).state_dict()
    for name, weights in a.items():
        torch.testing.assert_close(b[name], weights, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert any(not torch.equal(b[name], fresh[name]) for name in fresh)


@T.architectures(T.DECODERS)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_activation_checkpointing_changes_nothing(host: T.Architecture) -> None:
    model = T.awaken(T.stream(host, "memorizing")).train()
    past, found = given(model), []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        out = model(TOKENS, labels=TOKENS, document_ids=IDS, memory_state=past)
        found.append((out.loss, gradients(model, out.loss)))
    torch.testing.assert_close(found[1], found[0])


def piece_by_piece(model: Any, past: Any, targets: Tensor) -> tuple[Tensor, list[Any]]:
    """The mean loss and the rows' states of a loop over segments and, in each, over the documents in it."""
    total, states = torch.zeros(()), [row_of(past, row) for row in range(len(IDS))]
    for row in range(len(IDS)):
        reading = None
        for piece in torch.arange(IDS.shape[1]).split(T.SEGMENT):
            for name in dict.fromkeys(IDS[row, piece][IDS[row, piece] >= 0].tolist()):
                columns = piece[IDS[row, piece] == name]
                state = states[row] if reading in (None, name) else model.init_memory_state(1)
                out, reading = model(TOKENS[row : row + 1, columns], memory_state=state), name
                states[row] = out.memory_state
                total = total + F.cross_entropy(out.logits[0], targets[row, columns], reduction="sum")
    return total / (targets != -100).sum(), states


@pytest.mark.parametrize("kind", [SegmentLoop, ReplayLoop])
@pytest.mark.parametrize("host, memory, length", [(T.GPT2, "rmt", None), (T.LLAMA, "grc_stream", T.SEGMENT)], ids=str)
def test_a_loop_over_segments_of_packed_rows(
    host: T.Architecture, memory: str, length: int | None, kind: type[SegmentLoop]
) -> None:
    model = T.awaken(T.stream(host, memory, length))
    past, targets = given(model), torch.full_like(TOKENS, -100)
    for row, columns, _ in documents():
        targets[row, columns[:-1]] = TOKENS[row, columns[1:]]
    loss, state = kind(model, T.SEGMENT, bptt=4)(TOKENS, targets, past, documents=IDS)
    expected, states = piece_by_piece(model, past, targets)
    torch.testing.assert_close(loss, expected)
    for row, alone in enumerate(states):
        assert T.differences(row_of(state, row), alone) < 1e-4
    a, b = gradients(model, loss), gradients(model, expected)
    for name, grad in b.items():
        torch.testing.assert_close(a[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("memory", [T.STREAMS["rmt"], None], ids=str)
def test_a_host_by_name_is_told_of_documents(memory: Any) -> None:
    """Without a memory, too."""
    model = create_model("transformers", model=T.GPT2.build(), memory=memory).eval()
    whole = model(TOKENS, documents=IDS)
    for row, columns, _ in documents():
        alone = model(TOKENS[row : row + 1, columns])
        torch.testing.assert_close(whole.outputs[row, columns], alone.outputs[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(model(TOKENS, documents=IDS, last_only=True).outputs, whole.outputs[:, -1:])


ONE = T.words(1, 13)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys and values": (
        {"document_ids": NUMBERS, "use_cache": True},
        "use_cache.*continue with memory_state.*a row of",
    ),
    "other places": ({"document_ids": NUMBERS, "position_ids": PLACES}, "position_ids beside document_ids"),
    "only bounds": ({"cu_seq_lens_q": BOUNDS}, "cu_seq_lens_q: .*document_ids"),
    "other bounds": ({"position_ids": PLACES, "cu_seq_lens_q": BOUNDS[[0, 1, 3]]}, "cu_seq_lens_q bounds 2 .* 3"),
    "places that go on": ({"position_ids": torch.arange(13)[None], "seq_idx": NUMBERS}, "seq_idx bounds 3 .* 1"),
    "one that begins again": ({"document_ids": NUMBERS % 2}, r"documents\[0, 8\] is 0.*ended"),
    "no whole numbers": ({"document_ids": NUMBERS.float()}, "float32 .*whole numbers"),
    "another shape": ({"document_ids": NUMBERS[:, 1:]}, r"document_ids of shape \(1, 12\)"),
    "no tensor": ({"document_ids": NUMBERS.tolist()}, "document_ids of type list"),
    "a mask of pairs": ({"document_ids": NUMBERS, "attention_mask": torch.ones(1, 1, 13, 13)}, "mask of shape"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_contradicts_itself_or_cannot_be_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    refuses(message, T.stream(T.LLAMA, "rmt"), ONE, **call)


@T.architectures(T.DECODERS)
def test_a_text_that_goes_on_and_a_prompt_are_one_text(host: T.Architecture) -> None:
    model = T.stream(host, "rmt")
    cache = model(ONE[:, :3], use_cache=True).past_key_values
    for call in ({"document_ids": NUMBERS[:, :3]}, {"position_ids": torch.tensor([[3, 0, 1]])}):
        with pytest.raises(ValueError, match=rf"{next(iter(call))}.*continue with memory_state.*a row of its own"):
            model(ONE[:, :3], past_key_values=cache, **call)
    for call in ({"document_ids": NUMBERS}, {"position_ids": PLACES}, {"position_ids": PLACES, "use_cache": False}):
        refuses(rf"{next(iter(call))}.*generate continues one text", model.generate, ONE, max_new_tokens=2, **call)


@pytest.mark.parametrize("name", ["document_ids", "cu_seq_lens_q", "seq_idx"])
def test_encoders_refuse_it_with_the_reason(name: str) -> None:
    model = add_memory(T.BERT.build(), {"name": "rmt", "length": 2}, segment_length=T.SEGMENT)
    told = {"document_ids": NUMBERS, "cu_seq_lens_q": BOUNDS, "seq_idx": NUMBERS}[name]
    refuses(rf"{name}: an encoder .*one text a row; .*a row of its own", model, ONE, **{name: told})


@pytest.mark.slow
def test_told_by_a_keyword_a_compiled_model_reads_documents() -> None:
    model = T.awaken(T.stream(T.GPT2, "grc_stream", None))
    expected = model(ONE, labels=ONE, document_ids=NUMBERS)
    found = torch.compile(model, backend="aot_eager")(ONE, labels=ONE, document_ids=NUMBERS)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    assert T.differences(found.memory_state, expected.memory_state) < 1e-5


@pytest.mark.slow
def test_places_alone_tell_a_compiled_graph_too_late() -> None:
    model = T.stream(T.GPT2, "grc_stream", None)
    compiled = torch.compile(model, backend="aot_eager")
    places = torch.arange(13)[None]
    torch.testing.assert_close(compiled(ONE, position_ids=places).logits, model(ONE).logits)
    refuses(r"position_ids.*document_ids", compiled, ONE, raises=RuntimeError, position_ids=PLACES)
