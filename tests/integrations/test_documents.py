"""Encoders of texts with a memory that has a state: documents read in segments, answered behind the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import PAD, SEGMENT, VOCABULARY, encoder, words
from integrations.hosts import close_gates, library
from integrations.transformers_hosts import awaken, differences
from torch import Tensor, nn

from cached_transformers import SegmentLoop, add_memory, generate, read_stream

RMT = {"name": "rmt", "length": 3}
CACHE = {"name": "grc_stream", "length": 4}
MEMORIES = [RMT, CACHE, {"name": "memorizing", "length": 16, "k": 4}]
CLASSIFIERS = [
    encoder("Albert", "", "ForSequenceClassification", embedding_size=16, num_hidden_groups=1),
    encoder("Bert", "", "ForSequenceClassification"),
    encoder("DebertaV2", "", "ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder("DistilBert", "", "ForSequenceClassification", hidden_dim=64),
    encoder("Electra", "", "ForSequenceClassification", embedding_size=16),
    encoder("ModernBert", "", "ForSequenceClassification", local_attention=4, cls_token_id=3, sep_token_id=4),
    encoder("MPNet", "", "ForSequenceClassification"),
    encoder("Roberta", "", "ForSequenceClassification"),
]
NAMED = {family.name: family for family in CLASSIFIERS}
some = pytest.mark.parametrize("memory", MEMORIES, ids=lambda spec: spec["name"])


def bert(memory: Any, cls: str = "BertForSequenceClassification", segment_length: int | None = SEGMENT) -> Any:
    model = NAMED["bert"].build() if cls == "BertForSequenceClassification" else encoder("Bert", "", cls[4:]).build()
    torch.manual_seed(1)
    return awaken(add_memory(model, memory, segment_length=segment_length))


def pieces(ids: Tensor) -> list[Tensor]:
    """The segments of one row without padding: each begins with the row's first token."""
    later = ids[:, SEGMENT:].split(SEGMENT - 1, 1)
    return [ids[:, :SEGMENT], *(torch.cat([ids[:, :1], piece], 1) for piece in later if piece.shape[1])]


def together(parts: list[Tensor]) -> Tensor:
    """The outputs of a row: of its first token, that of the last segment."""
    return torch.cat([parts[-1][:, :1], *(part[:, 1:] for part in parts)], 1)


def unequal(lengths: list[int], total: int, side: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Rows, each alone and in a batch with its padding on one side, or (mixed) one row's on the other."""
    rows = [words(1, n, seed=n) for n in lengths]
    ids, mask = torch.full((len(rows), total), PAD), torch.zeros(len(rows), total, dtype=torch.long)
    for index, row in enumerate(rows):
        left = side == "left" or (side == "mixed" and index == 0)
        place = slice(total - row.shape[1], total) if left else slice(0, row.shape[1])
        ids[index, place], mask[index, place] = row[0], 1
    return rows, {"input_ids": ids, "attention_mask": mask}


def rmt_twin(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The equations of the paper over BERT's own layers: outputs of one row, and what its memory tokens became."""
    bert, memory = model.base_model, model.base_model.memory
    carried, parts = memory.initial_MD[None], []
    for piece in pieces(ids):
        x = bert.encoder(torch.cat([carried, bert.embeddings(piece)], 1)).last_hidden_state
        carried = x[:, :3]
        parts.append(x[:, 3:])
    return together(parts), carried


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
def test_documents_are_read_as_the_paper_says_row_by_row(side: str) -> None:
    model = bert(RMT, "BertModel").double()
    rows, batch = unequal([12, 7, 5, 1], 13, side)
    out = model(**batch, output_hidden_states=True)
    expected, loss = [rmt_twin(model, row) for row in rows], 0.0
    for index, (x, carried) in enumerate(expected):
        found = out.last_hidden_state[index, batch["attention_mask"][index] > 0]
        torch.testing.assert_close(found, x[0])
        torch.testing.assert_close(out.hidden_states[-1][index, batch["attention_mask"][index] > 0], x[0])
        torch.testing.assert_close(out.pooler_output[index], model.pooler(x)[0])
        torch.testing.assert_close(out.memory_state.model.tokens_BMD[index], carried[0])
        assert out.memory_state.model.segments_B[index] == len(pieces(rows[index]))
        loss = loss + model.pooler(x).square().sum()
    weights = [model.memory.initial_MD, *model.encoder.parameters(), model.embeddings.word_embeddings.weight]
    found_grads = torch.autograd.grad(out.pooler_output.square().sum(), weights)
    for found, want in zip(found_grads, torch.autograd.grad(loss, weights), strict=True):
        torch.testing.assert_close(found, want)


@some
def test_segments_of_a_call_are_calls_of_a_segment(memory: Any) -> None:
    model, ids = bert(memory), words(2, 12)
    whole = model(ids)
    alone = bert(memory, segment_length=None)
    state = None
    for piece in pieces(ids):
        out = alone(piece, memory_state=state)
        state = out.memory_state
    torch.testing.assert_close(whole.logits, out.logits)
    assert differences(whole.memory_state, state) < 1e-6
    more = model(ids, memory_state=state).logits
    assert (more - whole.logits).abs().max() > 1e-5
    changed = torch.cat([ids[:, :1], (ids[:, 1:2] + 1).clamp(max=VOCABULARY - 1), ids[:, 2:]], 1)
    assert (model(changed).logits - whole.logits).abs().max() > 1e-7  # of the first segment, three before the answer


def test_a_closed_memory_leaves_each_segment_as_it_is_alone() -> None:
    plain, model, ids = NAMED["bert"].build().base_model, bert(CACHE).base_model, words(2, 12)
    close_gates(model)
    out, parts = model(ids), [plain(piece) for piece in pieces(ids)]
    torch.testing.assert_close(out.last_hidden_state, together([part.last_hidden_state for part in parts]))
    torch.testing.assert_close(out.pooler_output, parts[-1].pooler_output)


@pytest.mark.parametrize("family", CLASSIFIERS, ids=str)
@pytest.mark.parametrize("memory", [RMT, CACHE], ids=lambda spec: spec["name"])
def test_a_row_s_answer_is_that_of_the_row_alone(family: Any, memory: Any) -> None:
    model = awaken(add_memory(family.build(), memory, segment_length=SEGMENT))
    rows, batch = unequal([12, 6, 3], 14, "mixed")
    found, state = model(**batch).logits, model(**batch).memory_state
    for index, row in enumerate(rows):
        alone = model(row)
        torch.testing.assert_close(found[index], alone.logits[0], rtol=1e-4, atol=1e-5)
        mine = [t[index : index + 1] for t in (state.model if memory is RMT else state.layers[0])]
        assert differences(tuple(mine), tuple(_of(alone.memory_state, memory))) < 1e-4


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_rows_that_wait_for_longer_ones_change_no_gradient(kind: str) -> None:
    model = bert(CACHE).double()
    model.set_attn_implementation(kind)
    rows, batch = unequal([12, 4, 1], 14, "mixed")
    weights = list(model.parameters())

    def gradients(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]

    together = gradients(model(**batch).logits.square().sum())
    alone = gradients(sum(model(row).logits.square().sum() for row in rows))  # type: ignore[arg-type]
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected)


def _of(state: Any, memory: Any) -> Any:
    return state.model if memory is RMT else state.layers[0]


def test_types_embeddings_and_places() -> None:
    model, ids = bert(RMT), words(2, 12)
    types = torch.zeros_like(ids)
    assert torch.equal(model(ids, token_type_ids=types).logits, model(ids).logits)
    types[:, 7:] = 1
    assert (model(ids, token_type_ids=types).logits - model(ids).logits).abs().max() > 1e-5
    embedded = model.bert.embeddings.word_embeddings(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    long = words(2, 150)  # of a model with 64 positions, all of which a segment may take beside its memory
    assert model(long).logits.shape == (2, 2)
    full = add_memory(NAMED["bert"].build(), RMT, segment_length=64)
    assert full(long).memory_state.model.segments_B.tolist() == [3, 3]
    as_tuple = model(ids, return_dict=False)
    assert torch.equal(as_tuple[0], model(ids).logits)


def test_models_that_answer_for_each_token_and_for_each_choice() -> None:
    ids = words(2, 12)
    for cls in ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"):
        model = bert(RMT, cls)
        out = model(ids)
        logits = out.start_logits if "Question" in cls else out.logits
        assert logits.shape[:2] == (2, 12)
    choices = bert(RMT, "BertForMultipleChoice")
    out = choices(words(6, 12).view(2, 3, 12))
    assert out.logits.shape == (2, 3) and out.memory_state.model.segments_B.shape == (6,)


def test_a_cache_of_rows_has_its_own_number_of_slots() -> None:
    model = add_memory(NAMED["bert"].build(), "grc_stream", segment_length=SEGMENT)
    assert model.init_memory_state(2).layers[0].cache_BMC.shape[1] == 64  # not one for each of the 64 positions


@pytest.mark.slow
@some
def test_compiled_with_padding_on_either_side(memory: Any) -> None:
    model = bert(memory)
    _, batch = unequal([12, 7], 12, "mixed")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)


def test_trainer_takes_rows_of_whole_documents(tmp_path: Path) -> None:
    transformers = library("transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    rows = [{"input_ids": words(1, 12, seed=n)[0], "labels": n % 2} for n in range(4)]
    model = bert(RMT)
    before = model.bert.memory.initial_MD.clone()
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(tmp_path, max_steps=2, save_strategy="no", **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert not torch.equal(model.bert.memory.initial_MD, before)
    assert trainer.predict(rows).predictions.shape == (4, 2)


def test_who_sees_the_next_token_does_not_predict_it() -> None:
    model = bert(RMT, "BertForMaskedLM", None)
    for use in (lambda: generate(model, words(1, 3), tokens=2), lambda: list(read_stream(model, [[1, 2]], 5))):
        refuses(r"BertForMaskedLM", use)
    refuses("BertForSequenceClassification", SegmentLoop, bert(RMT, segment_length=None), 4)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"position_ids": torch.arange(12)[None]}, "position_ids: "),
    ({"output_attentions": True}, "output_attentions=True: "),
    ({"attention_mask": torch.ones(2, 12, 12)}, r"attention_mask of shape \(2, 12, 12\): .* \(2, 12\)$"),
    ({"past_key_values": object()}, "past_key_values: an encoder with a memory"),
]


@pytest.mark.parametrize("given, message", CALLS, ids=[next(iter(call[0])) + str(i) for i, call in enumerate(CALLS)])
def test_calls_that_a_memory_cannot_follow_are_refused(given: dict[str, Any], message: str) -> None:
    refuses(message, bert(RMT), words(2, 12), **given)


def test_states_of_others_are_refused() -> None:
    model, ids = bert(RMT), words(2, 12)
    refuses("the state is that of another model", model, ids, memory_state=bert(CACHE).init_memory_state(2))
    refuses(r"the state has 3 rows .*, the segment 2", model, ids, memory_state=model.init_memory_state(3))


CLASSES, NOISE = 4, 8


def documents(rows: int, segments: int, seed: int) -> tuple[Tensor, Tensor]:
    """(B, M) token ids: a fact somewhere in the first segment, then noise; and the facts. SEGMENT - 1 tokens a segment
    follow the first token."""
    generator = torch.Generator().manual_seed(seed)
    fact = torch.randint(CLASSES, (rows,), generator=generator)
    noise = torch.randint(1 + CLASSES, 1 + CLASSES + NOISE, (rows, 1 + segments * 3), generator=generator)
    noise[:, 0] = 0
    noise[torch.arange(rows), torch.randint(1, 4, (rows,), generator=generator)] = 1 + fact
    return noise, fact


def test_a_document_is_classified_by_a_fact_in_the_first_of_its_sixteen_segments() -> None:
    """BERT alone, given the last segment, which is what it has positions for, stays at chance."""
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": 16, "max_position_embeddings": 4, "num_labels": CLASSES, "pad_token_id": 15}
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    config = transformers.BertConfig(**sizes, **more)
    scores = []
    for memory in (True, False):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        if memory:
            add_memory(model, "rmt", length=4, segment_length=4)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

        def seen(ids: Tensor, memory: bool = memory) -> Tensor:
            return ids if memory else torch.cat([ids[:, :1], ids[:, -3:]], 1)

        for step, segments in enumerate([1] * 20 + [2] * 60 + [4] * 40 + [8] * 20 + [16] * 10):
            ids, facts = documents(64, segments, step)
            optimizer.zero_grad()
            model(seen(ids), labels=facts).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ids, facts = documents(256, 16, 1000)
        with torch.no_grad():
            scores.append(float((model.eval()(seen(ids)).logits.argmax(-1) == facts).float().mean()))
    assert scores[0] > 0.95 and scores[1] < 0.4, scores
