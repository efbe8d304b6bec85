"""Inside lm-evaluation-harness itself (`make test-peers` installs it): scores, texts, and tasks from end to end."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.made import TEXT, train_on_bytes
from common import refuses, stirred
from harness.test_scoring import alone
from integrations.hosts import library
from integrations.transformers_hosts import byte_tokenizer

from cached_lab.experiments import harness
from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.harness.__main__ import main
from cached_lab.experiments.load import load_run
from cached_lab.tasks.language.scores import split_losses
from cached_lab.training.distributed import World
from cached_transformers import add_memory, generate

pytestmark = pytest.mark.peers
SEGMENT = 8
CONTEXT = TEXT[: 5 * SEGMENT + 3]


@pytest.fixture(scope="module", autouse=True)
def lm_eval() -> Any:
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of bytes, hardly trained, whose gates are open."""
    return train_on_bytes(tmp_path_factory.mktemp("harness"), "training.evaluation_batch_size=1")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with a memory, and its tokenizer beside it."""
    transformers, folder = library("transformers"), tmp_path_factory.mktemp("host")
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    add_memory(model, "rmt", length=2, segment_length=SEGMENT).eval()
    stirred(model, 0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def cached(folder: Path, **options: Any) -> Any:
    return harness.CachedLM.create_from_arg_obj({"run": str(folder), "device": "cpu", **options})


def asked(kind: str, *arguments: Any) -> list[Any]:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_continuations_are_scored_behind_contexts_of_any_length(run: Path) -> None:
    lm, model = cached(run, batch_size=3), load_run(run)[1].double().eval()
    lm.model.double()
    pairs = [(CONTEXT, " winter"), (CONTEXT, " it"), ("It was", " spring and more"), ("", "naïve"), ("It was ", "so")]
    found = lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (logp, greedy) in zip(pairs, found, strict=True):
        spaces = len(context) - len(context.rstrip())  # the harness' rule: they belong to the continuation
        before = [ord("\n"), *context[: len(context) - spaces].encode()]
        ids = [ord("\n"), *(context + continuation).encode()]
        want, _ = alone(model, (ids, len(before)), SEGMENT)
        assert logp == pytest.approx(want, abs=1e-10) and greedy in (True, False)
    forgetful = alone(model, ([*CONTEXT[-SEGMENT:].encode(), *b" winter"], SEGMENT), SEGMENT)[0]
    assert abs(found[0][0] - forgetful) > 1e-4


def test_a_rolling_text_has_the_perplexity_that_evaluate_gives(run: Path) -> None:
    config, model, _ = load_run(run)
    data: Any = build_dataset(config, "test")
    losses = split_losses(model, data, World(torch.device("cpu")), config)
    scores = losses.scores(data)
    text = bytes(data.tokens).decode()
    [nats] = cached(run).loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert -nats == pytest.approx(float(losses.places[0].sum()), rel=1e-6)
    assert math.exp(-nats / len(data.tokens)) == pytest.approx(scores["perplexity"], rel=1e-6)


def test_texts_are_those_of_generate_up_to_a_string(run: Path, host: Path) -> None:
    lm, model = cached(run, batch_size=2), load_run(run)[1]
    ids = torch.tensor([[ord("\n"), *CONTEXT.encode()]])
    want = bytes(generate(model, ids, tokens=20, temperature=0, segment_length=SEGMENT).tokens[0].tolist())
    text = want.decode(errors="replace")
    plain = {"until": [], "max_gen_toks": 20}
    prompts = [(CONTEXT, plain), ("It", plain), (CONTEXT, {**plain, "until": [text[5]]}), ("is", plain)]
    requests = asked("generate_until", *prompts)
    found = lm.generate_until(requests, disable_tqdm=True)
    assert found[0] == text and found[2] == text.partition(text[5])[0] and len(found) == 4
    theirs = cached(host)
    prompt = torch.tensor([byte_tokenizer()(CONTEXT)["input_ids"]])
    tokens = theirs.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    expected = byte_tokenizer().decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
    [told] = theirs.generate_until(asked("generate_until", (CONTEXT, {"until": [], "max_gen_toks": 12})), True)
    assert told == expected
    refuses("'num_beams'", lm.generate_until, asked("generate_until", (CONTEXT, {"num_beams": 3})), disable_tqdm=True)


TASKS = {
    "made_choice": {
        **{"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}"},
        **{"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]},
    },
    "made_rolling": {
        **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}"},
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "made_writing": {
        **{"output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{target}}"},
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three tasks on one local file, with the text of the model as the right answer, and no network."""
    model = load_run(run)[1]
    ids = torch.tensor([[ord("\n"), *CONTEXT.encode()]])
    written = bytes(generate(model, ids, tokens=6, temperature=0, segment_length=SEGMENT).tokens[0].tolist())
    target = written.decode(errors="replace").partition("\n")[0]
    doc = {"context": CONTEXT, "choices": [" qqqq", " it"], "answer": 1, "target": target}
    (tmp_path / "docs.jsonl").write_text(json.dumps(doc) + "\n", encoding="utf-8")
    files = {"data_files": {"test": str(tmp_path / "docs.jsonl")}}
    for name, task in TASKS.items():
        text = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(text), encoding="utf-8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def command(*words: object) -> list[str]:
    return ["harness", "run", "--model", "cached", *map(str, words)]


def test_tasks_run_from_end_to_end(run: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tasks / "out"
    words = command("--model_args", f"run={run}", "--include_path", tasks, "--tasks", ",".join(TASKS))
    monkeypatch.setattr(sys, "argv", [*words, "--output_path", str(out), "--batch_size", "4", "--device", "cpu"])
    assert main() == 0
    [path] = out.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    nats = -alone(load_run(run)[1].eval(), ([ord("\n"), *CONTEXT.encode()], 1), SEGMENT)[0]
    assert results["made_choice"]["acc,none"] == 1.0 and results["made_writing"]["exact_match,none"] == 1.0
    bits = nats / math.log(2) / len(CONTEXT.encode())
    assert results["made_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("checkpoint=best", "run=FOLDER is missing"),
        ("run=nowhere", "nowhere is not a run folder"),
        ("run=x,lenght=3", "unknown model argument 'lenght'"),
        ("run=x,segment_length=0", "segment_length=0 must be a whole number from 1 on"),
    ],
)
def test_bad_arguments_end_it_with_a_message(
    arguments: str, message: str, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("--model_args", arguments, "--include_path", tasks, "--tasks", "made_choice")
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 2
    assert message in capsys.readouterr().err


def test_the_device_that_the_harness_says_for_nobody_is_there_or_another_is_taken(run: Path) -> None:
    lm = harness.CachedLM.create_from_arg_string(f"run={run},max_gen_toks=3", {"device": "cuda:0", "batch_size": 2})
    assert lm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (lm.batch_size, lm.max_gen_toks, lm.tokenizer_name) == (2, 3, str(run))
    if not torch.cuda.is_available():
        refuses("no CUDA device", cached, run, device="cuda:0")
    refuses("batch_size='auto'", cached, run, batch_size="auto")
