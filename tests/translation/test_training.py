"""The training task: the data of a step, bitwise resume, averaged checkpoints, scores and refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from common import refuses
from torch import Tensor
from torch.nn import functional as F
from translation.made import recipe, write_corpus

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.load import load_run
from cached_lab.experiments.run import run_training
from cached_lab.tasks.recipes import config_from_dict, fill_from_data
from cached_lab.tasks.translation.scores import corpus_scores
from cached_lab.tasks.translation.task import TranslationTask
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.metrics import read_metrics
from cached_lab.training.stored_weights import load_average
from cached_transformers.layers.token_loss import IGNORED

pytestmark = pytest.mark.usefixtures("no_run_reports")
ALONE = World(torch.device("cpu"))


@dataclass(frozen=True)
class Pretended(World):
    """One of several processes, the others being imagined: they bring as many tokens as it takes to `total`."""

    total: float = 0.0

    def sum(self, values: Tensor) -> Tensor:
        return torch.full_like(values.double(), self.total)


def prepared(corpus: Path, model: dict[str, Any] | None = None, **training: Any) -> tuple[RunConfig, Any]:
    tree = recipe(corpus, **{"label_smoothing": 0.0, **training})
    tree["model"] |= {"dropout": 0.0, **(model or {})}
    config = config_from_dict(tree)
    data = build_dataset(config, "train")
    return fill_from_data(config, data.describe()), data


def gradients(config: RunConfig, data: Any, world: World, step: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    model = build_model(config).double()
    task = TranslationTask(config, model, data, data, world)
    _, runner = task.runner() if world.size == 1 else (None, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    total = torch.zeros(3, dtype=torch.float64)
    for piece in islice(task.batches(step), config.training.accumulate):
        total += task.backward(runner, piece, scaler)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


def by_hand(config: RunConfig, data: Any, smoothing: float = 0.0, step: int = 0) -> tuple[dict[str, Tensor], float]:
    """Sentence by sentence, without padding: the mean over the target tokens of a step."""
    model = build_model(config).double()
    rows = TranslationTask(config, model, data, data, ALONE).order.rows(step)
    losses, tokens = torch.zeros((), dtype=torch.float64), 0
    for _, row in rows:
        source, read, said = data[row]
        logits = model(source[None], read[None]).outputs[0]
        losses = losses + F.cross_entropy(logits, said, reduction="sum", label_smoothing=smoothing)
        tokens += len(said)
    (losses / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, float(losses.detach() / tokens)


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert torch.allclose(gradient, second[name], rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_is_the_mean_over_its_target_tokens(corpus: Path, accumulate: int, smoothing: float) -> None:
    config, data = prepared(corpus, accumulate=accumulate, label_smoothing=smoothing)
    found, total = gradients(config, data, ALONE)
    expected, loss = by_hand(config, data, smoothing)
    assert_equal(found, expected)
    assert float(total[0] / total[2]) == pytest.approx(loss, rel=1e-6)
    rows = [row for _, row in TranslationTask(config, build_model(config), data, data, ALONE).order.rows(0)]
    assert total[1:].tolist() == data.lengths[rows].sum(0).tolist()


def test_pieces_without_rows_and_processes_change_nothing(corpus: Path) -> None:
    config, data = prepared(corpus)
    config = replace(config, training=replace(config.training, batch_tokens=int(data.lengths.max())))
    world = ALONE
    order = TranslationTask(config, build_model(config), data, data, world).order
    step = next(s for s in range(99) if len(order.rows(s)) == 2)
    expected, _ = by_hand(config, data, step=step)
    pieces = replace(config, training=replace(config.training, accumulate=4))
    assert_equal(gradients(pieces, data, world, step)[0], expected)
    tokens = float(data.lengths[[row for _, row in order.rows(step)], 1].sum())
    ranks = [gradients(config, data, Pretended(torch.device("cpu"), rank, 3, total=tokens), step) for rank in range(3)]
    averaged = {name: sum(found[name] for found, _ in ranks) / 3 for name in expected}  # as DDP does
    assert_equal(averaged, expected)
    assert sum(float(total[2]) for _, total in ranks) == tokens


def test_batches_of_rows_where_tokens_are_not_asked_for(corpus: Path) -> None:
    config, data = prepared(corpus, batch_tokens=None, batch_size=6, accumulate=2)
    found, _ = gradients(config, data, ALONE)
    assert_equal(found, by_hand(config, data)[0])


def test_auxiliary_losses_weigh_by_tokens(corpus: Path) -> None:
    config, data = prepared(corpus)

    class Extra(torch.nn.Module):
        vocabulary = max_length = target_vocabulary = 10**6
        encode = None

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs: Tensor, decoder_inputs: Tensor, **keywords: Any) -> Any:
            from cached_transformers.layers.stack import ModelOutput

            nothing = (keywords["targets"] != IGNORED) * 0.0 * self.weight
            return ModelOutput(nothing, None, self.weight**2)

    for accumulate in (1, 3):
        chosen = replace(config, training=replace(config.training, accumulate=accumulate))
        model = Extra()
        task = TranslationTask(chosen, model, data, data, ALONE)
        total = torch.zeros(3, dtype=torch.float64)
        for piece in islice(task.batches(0), accumulate):
            total += task.backward(model, piece, torch.amp.GradScaler("cpu", enabled=False))
        assert float(model.weight.grad) == pytest.approx(4.0)  # d w^2 / d w, once
        assert float(total[0]) == 0


def test_the_average_is_the_mean_of_the_weights_and_keeps_the_newest_cache(trained: Path) -> None:
    paths = Checkpoints(trained / "checkpoints").paths()[-3:]
    _, model, _ = load_run(trained, "last")
    stored = [read_checkpoint(path).weights for path in paths]
    step = load_average(model, trained, 3)
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert step == 160 and [path.name[-3:] for path in paths] == ["120", "140", "160"]
    buffers = {name for name, _ in model.named_buffers()}
    caches = [name for name in buffers if name.endswith("cache_MC")]
    assert caches
    for name in copied:
        mean = torch.stack([weights[name].double() for weights in stored]).mean(0).float()
        if name in buffers:
            assert torch.equal(copied[name], stored[-1][name])
        else:
            assert torch.allclose(copied[name], mean, atol=1e-6)
    assert all(not torch.equal(stored[-1][name], stored[0][name]) for name in caches)
    refuses(r"3.*training.keep=4", load_average, model, trained, 4)


def test_the_summary_says_what_evaluate_says(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    test = summary["test"]
    assert 1 < test["bleu"] <= 100 and test["sentences"] == 30
    assert summary["steps_per_epoch"] > 0 and summary["flops"] > 0
    low, high = test["bleu_interval"]
    assert low < test["bleu"] < high or test["bleu"] == pytest.approx(high)
    assert test["bleu_signature"].startswith("nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "tok:none" in test["tokenised_bleu_signature"] and "case:lc" in test["tokenised_bleu_signature"]
    words = ["evaluate", str(trained), "--json", "--device", "cpu"]
    for options in ([], ["--average", "3"]):
        assert main([*words, *options]) == 0
        row = json.loads(capsys.readouterr().out)["scores"][0]
        assert {key: row[key] for key in test if key != "step"} == {key: v for key, v in test.items() if key != "step"}
    assert main([*words, "--checkpoint", "last", "--split", "validation"]) == 0
    row = json.loads(capsys.readouterr().out)["scores"][0]
    assert row["loss"] == summary["final"]["loss"] and row["sentences"] == 20
    assert main(["evaluate", str(trained), "--device", "cpu", "--memory", "carry,reset"]) == 0
    printed = capsys.readouterr().out
    assert "reset" in printed and "tok:13a" in printed and f"{test['chrf']:.4f}" in printed


def test_translations_stand_beside_their_references(trained: Path, corpus: Path) -> None:
    blocks = (trained / "translations.txt").read_text(encoding="utf-8").split("\n\n")
    assert len(blocks) == 30
    rows = [dict(line.split("\t", 1) for line in block.strip("\n").split("\n")) for block in blocks]
    for name, language in (("source", "de"), ("reference", "en")):
        assert [row[name] for row in rows] == (corpus / f"test.{language}").read_text(encoding="utf-8").splitlines()
    scores = corpus_scores([row["hypothesis"] for row in rows], [row["reference"] for row in rows], "en", "raw")
    assert scores["bleu"] == json.loads((trained / "summary.json").read_text(encoding="utf-8"))["test"]["bleu"]


def test_scores_are_those_of_sacrebleu() -> None:
    import sacrebleu

    said, wanted = ["The dog, it sleeps.", "A cat"], ["The dog: it sleeps!", "a cat sees"]
    found = corpus_scores(said, wanted, "en", "raw", resamples=50)
    assert found["bleu"] == sacrebleu.corpus_bleu(said, [wanted]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(said, [wanted]).score
    tokens = [["the dog , it sleeps .", "a cat"], ["the dog : it sleeps !", "a cat sees"]]
    expected = sacrebleu.corpus_bleu(tokens[0], [tokens[1]], tokenize="none", force=True).score
    assert found["tokenised_bleu"] == expected
    # Moses tokens are put together for sacreBLEU, and taken as they are for the other.
    moses = corpus_scores(["now we &apos;re here ."] * 2, ["now we &apos;re here ."] * 2, "en", "moses")
    assert moses["bleu"] == moses["tokenised_bleu"] == pytest.approx(100)
    said, wanted = ["we &apos;re not here ."], ["we &apos;re here , now ."]
    found = corpus_scores(said, wanted, "en", "moses")
    assert found["bleu"] == sacrebleu.corpus_bleu(["we're not here."], [["we're here, now."]]).score
    assert found["tokenised_bleu"] == sacrebleu.corpus_bleu(said, [wanted], tokenize="none", force=True).score
    # Resamples without any hit, and some with: none stops the scores.
    said, wanted = ["", "zzz", "a cat sees the dog"], ["qqq", "b", "a cat sees the dog"]
    mixed = corpus_scores(said, wanted, "en", "raw", resamples=100)
    assert 0 <= mixed["bleu_interval"][0] < mixed["bleu"] and "chrf_interval" not in mixed and "chrf_signature" in mixed
    refuses("1 translations for 2 references", corpus_scores, ["a"], ["a", "b"], "en", "raw")


def test_validation_translates_as_many_sentences_as_asked(corpus: Path, tmp_path: Path) -> None:
    tree = recipe(corpus, steps=2, evaluate_every=2, metric="bleu", ema_decay=0.5, test="both")
    tree["evaluation"] = {"bleu_sentences": 5, "beams": 2, "tokens": 6}
    summary = run_training(config_from_dict(tree), tmp_path / "run")
    (line,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "validation"]
    assert line["sentences"] == 5 and 0 <= line["bleu"] <= 100 and "bleu_interval" not in line
    assert summary["best"]["bleu"] == line["bleu"] and summary["test"]["sentences"] == 30
    assert summary["test_last"]["bleu"] == summary["test"]["bleu"]
    config, model, _ = load_run(tmp_path / "run")
    stored = read_checkpoint(Checkpoints(tmp_path / "run" / "checkpoints").named("last"))
    assert not torch.equal(model.embedding.weight, stored.training["live_weights"]["embedding.weight"])
    assert config.training.ema_decay == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "grc"])
def test_the_made_language_is_learned(corpus: Path, tmp_path: Path, memory: str | None) -> None:
    summary = run_training(config_from_dict(recipe(corpus, memory, steps=700, evaluate_every=700)), tmp_path / "run")
    assert summary["test"]["bleu"] > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.metric=accuracy", "training.metric='accuracy' does not suit data 'translation'; take loss"),
        ("training.metric=bleu", "training.metric=bleu needs translations of the validation split"),
        ("training.batch_tokens=10", "batch_tokens=10 is less than the"),
        ("training={batch_tokens: null, batch_size: 301}", "batch_size=301 exceeds the 300 training pairs"),
        ("training.average_last=3", "average_last=3 must not exceed training.keep=2"),
        ("training={average_last: 3, keep: 3}", "average_last=3, but training.steps=4 .* make 1; save more often"),
        ("training={average_last: 2, ema_decay: 0.9}", "average_last=2 does not go with training.ema_decay=0.9"),
        ("model.vocabulary=7", r"model.vocabulary=7, but data 'translation' has vocabulary=\d+"),
        ("model.max_length=7", "model.max_length=7 must be at least the data's 64"),
        ("model={name: sequence_classifier, classes: 3}", "'sequence_classifier'.*take encoder_decoder"),
        ("evaluation.beams=0", "evaluation.beams=0 must be at least 1"),
        ("evaluation.tokens=-3", "evaluation.tokens=-3 must be at least 1"),
        ("evaluation.bleu_sentences=-1", "evaluation.bleu_sentences=-1 must not be negative"),
    ],
)
def test_what_does_not_suit_is_refused(corpus: Path, tmp_path: Path, change: str, message: str) -> None:
    tree = recipe(corpus)
    key, _, value = change.partition("=")
    section, _, option = key.partition(".")
    tree[section] = {**tree.get(section, {}), **({option: yaml.safe_load(value)} if option else yaml.safe_load(value))}
    refuses(message, lambda: run_training(config_from_dict(tree), tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_does_not_go_on_with_other_subwords(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    run_training(config_from_dict(recipe(folder, steps=1, test="none")), tmp_path / "run")
    text = (folder / "train.de").read_text(encoding="utf-8").replace("hund", "wolf")
    (folder / "train.de").write_text(text, encoding="utf-8")
    refuses(r"tokenizer.json", run_training, config_from_dict(recipe(folder, steps=2, test="none")), tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 2


def test_evaluate_refuses(trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(config_from_dict(recipe(corpus, steps=1, test="none")), tmp_path / "plain")
    for folder, options, message in (
        (tmp_path / "plain", ["--memory", "reset"], "has no cache to reset; take carry"),
        (trained, ["--memory", "other", "--other", str(trained)], "--memory 'other'"),
        (trained, ["--average", "9"], "so 9 cannot be averaged"),
        (trained, ["--segment-length", "9"], "is for text"),
    ):
        assert main(["evaluate", str(folder), "--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err
