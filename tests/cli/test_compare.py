"""Comparisons: variants, controls, seeds, results, and going on after an interruption."""

from __future__ import annotations

import json
import shutil
import statistics
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from common import refuses
from rich.console import Console
from scipy import stats

from cached_lab.cli.compare import parse_seeds
from cached_lab.cli.main import main
from cached_lab.experiments import compare
from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.load import load_run
from cached_lab.experiments.reports.blocks import ReportTable
from cached_lab.experiments.reports.terminal import open_console, show
from cached_lab.experiments.statistics import summarise
from cached_lab.experiments.variants import nearest_width, parse_variant, prepare
from cached_lab.tasks.recipes import load_config
from cached_lab.training.metrics import read_metrics
from cached_transformers import create_model
from cached_transformers.state import nbytes

pytestmark = pytest.mark.usefixtures("no_run_reports")
TINY = ["digits_vit_plain", "model.width=16", "model.depth=1", "model.heads=2", "model.feed_forward=16"]
TINY += ["training.steps=3", "training.evaluate_every=3", "training.tensorboard=false", "schedule.warmup_steps=1"]


def test_seeds_are_a_number_or_a_list_and_variants_have_options():
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("0,5") == [0, 5]
    assert parse_seeds("4,") == [4]
    for text in ("0", "a", "1,1", "-1,2", "", "999999999999"):
        refuses("--seeds", parse_seeds, text)
    assert parse_variant("plain") is None
    assert parse_variant("grc") == "grc"
    assert parse_variant("grc:ratio=0.25:variant=released") == {"name": "grc", "ratio": 0.25, "variant": "released"}
    refuses(r"'ratio'.*key=value", parse_variant, "grc:ratio")
    refuses("plain has no memory", parse_variant, "plain:ratio=1")


@pytest.mark.parametrize(("target", "width"), [(1070, 10), (1074, 10), (1076, 11), (100, 1)])
def test_the_control_takes_the_nearest_width(target, width):
    assert nearest_width(lambda w: 970 + 10 * w, target) == width


def test_controls_of_texts_have_as_many_parameters_or_longer_segments(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one fish, two fish. " * 400)
    recipe = load_config("demo_text", [f"data.path={path}", "evaluation.segment_length=32"])
    variants, _ = prepare(recipe, ["plain", "transformer_xl", "grc_stream:ratio=1.0"], "parameters,longer")
    sizes = {v.name: sum(p.numel() for p in create_model(**v.config.model).parameters()) for v in variants}
    assert sizes["plain"] < 0.95 * sizes["transformer_xl"] < sizes["grc_stream:ratio=1.0"]
    assert sizes["control-parameters"] == pytest.approx(sizes["grc_stream:ratio=1.0"], rel=0.005)
    longer = variants[-1].config
    assert longer.model.get("memory") is None and sizes["control-longer"] == sizes["plain"]
    lengths = longer.training.segment_length, longer.training.segments, longer.evaluation.segment_length
    assert lengths == (64, 1, 64)
    odd = load_config("demo_text", [f"data.path={path}", "training.segments=3"])
    refuses(r"training\.segments=3", prepare, odd, ["plain"], "longer")


def documents(folder: Path) -> list[str]:
    """A recipe of labelled documents, as words of the command."""
    texts = [(f"{'good' if i % 2 else 'bad'} {'word ' * (3 + i % 9)}{i}", "ab"[i % 2]) for i in range(80)]
    lines = [json.dumps({"text": text, "label": label}) for text, label in texts]
    (folder / "a.jsonl").write_text("\n".join(lines))
    model = {"name": "sequence_classifier", "width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
    training = {"steps": 40, "batch_size": 8, "evaluate_every": 20, "tensorboard": False, "metric": "accuracy"}
    data = {"name": "labelled_documents", "path": str(folder / "a.jsonl"), "segment_length": 4}
    tree = {"data": data, "model": model, "training": training}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**tree, "optimizer": {"learning_rate": 0.03}}))
    return ["compare", str(folder / "recipe.yaml"), "--seeds", "1"]


def test_memories_are_compared_with_windows_and_the_whole_of_a_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    words, out = documents(tmp_path), tmp_path / "out"
    names = "plain,rmt:length=4,transformer_xl:length=8"
    assert main([*words, "--with", names, "--control", "window,whole", "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads((out / "compare.json").read_text())
    rows = {row["name"]: row for row in result["variants"]}
    assert list(rows) == [*names.split(","), "control-window-rmt:length=4", "control-whole"]
    score = {name: row["values"][0] for name, row in rows.items()}
    gain = score["control-whole"] - score["plain"]
    assert gain > 0 and "Efficiency:" in printed and "Efficiency:" in (out / "report.html").read_text()
    shown = [f"{(value - score['plain']) / gain:.3f}".replace("-", "\N{MINUS SIGN}") for value in score.values()]
    for name, share in zip(score, shown, strict=True):
        assert rows[name]["efficiency"] == pytest.approx((score[name] - score["plain"]) / gain)
        assert share in next(line for line in printed.splitlines() if line.startswith(f" {name} ")).split()
    recipe = load_config(words[1], ["training.curriculum=[1,2]", "training.solved=0.5"])
    whole = prepare(recipe, ["plain"], "whole")[0][-1].config
    assert whole.training.curriculum is None and whole.model["max_length"] == whole.data["segment_length"]
    for split in ("train", "validation", "test"):
        assert build_dataset(whole, split).segments == 1
    assert main([*words, "--with", "plain,rmt:length=4", "--out", str(out)]) == 0
    assert "--control whole" in capsys.readouterr().out, "why there is no number"


@pytest.mark.parametrize(
    ("recipe", "controls", "message"),
    [
        ("rmt_documents", "whole", "'planted_documents' must be documents that stay the same"),
        ("digits_vit_plain", "whole", "must be documents"),
        ("digits_vit_plain", "window", "add one, or leave it out"),
        ("digits_vit_grc", "window", "variant grc: .* of a window"),
    ],
)
def test_controls_that_the_data_or_the_memories_do_not_have_are_refused(recipe, controls, message):
    refuses(message, prepare, load_config(recipe), ["plain", *(["grc"] if recipe.endswith("_grc") else [])], controls)


@pytest.mark.parametrize(("test", "split"), [("none", "validation"), ("best", "test"), ("both", "test")])
def test_baselines_are_of_the_rows_that_are_scored(test, split, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path))
    sizes = ["data.train_size=200", "data.validation_size=70", "data.test_size=90"]
    recipe = load_config("listops_small_grc", [*sizes, f"training.test={test}"])
    _, baselines = prepare(recipe, ["plain"], "")
    assert baselines == build_dataset(recipe, split).baselines(build_dataset(recipe, "train"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """A comparison of variants and both controls: its folder, and its output."""
    out, printed = tmp_path_factory.mktemp("compared") / "comparison", StringIO()
    arguments = ["compare", *TINY, "--with", "plain,grc,grc:ratio=0.25", "--control", "conv,flops", "--seeds", "2"]
    with redirect_stdout(printed):
        assert main([*arguments, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_digits_with_memory_and_both_controls(compared):
    out, printed = compared
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    names = ["plain", "grc", "grc:ratio=0.25", "control-conv", "control-flops"]
    assert [v["name"] for v in result["variants"]] == [s["name"] for s in result["statistics"]] == names
    assert [result[key] for key in ("reference", "metric", "split")] == ["plain", "accuracy", "test"]
    assert result["seeds"] == [0, 1]
    rows = {v["name"]: v for v in result["variants"]}
    assert rows["control-flops"]["flops"] == pytest.approx(rows["grc"]["flops"], rel=0.02)
    assert rows["control-flops"]["flops_ratio"] == pytest.approx(rows["control-flops"]["flops"] / rows["grc"]["flops"])
    assert rows["plain"]["flops"] < rows["grc:ratio=0.25"]["flops"] < rows["grc"]["flops"]
    for row in result["variants"]:
        for folder, value in zip(row["runs"], row["values"], strict=True):
            summary = json.loads((out / folder / "summary.json").read_text(encoding="utf-8"))
            assert summary["test"]["accuracy"] == value
            assert summary["parameters"] == row["parameters"]
    values = {v["name"]: v["values"] for v in result["variants"]}
    assert result["statistics"] == json.loads(json.dumps(summarise(values, "plain")))
    assert 0.05 < result["baselines"]["majority class"] < 0.2
    assert (out / "report.html").is_file() and "control-flops: feed_forward" in printed
    assert "baseline: majority class" in printed and "of the FLOPs of the most expensive variant" in printed
    assert "| control-flops |" in (out / "compare.md").read_text(encoding="utf-8")
    assert (out / "grc" / "seed_0" / "gates.json").is_file()
    assert not (out / "plain" / "seed_0" / "gates.json").exists()
    config, _, _ = load_run(out / "grc" / "seed_0")
    assert config.model["memory"] == "grc" and config.model["image_size"] == 8


def paired_by_hand(first: list[float], second: list[float]) -> tuple[float, float | None]:
    """Mean difference and p of the paired t-test as a textbook writes it: t = mean / (deviation / sqrt(n)).

    Three steps of training leave few different scores: where all differences are equal there is no t.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n, mean = len(differences), statistics.mean(differences)
    if statistics.stdev(differences) < 1e-12:
        return mean, 1.0 if abs(mean) < 1e-12 else None
    t = mean / (statistics.stdev(differences) / n**0.5)
    return mean, 2 * stats.t.sf(abs(t), n - 1)


def test_any_variant_may_be_the_one_that_others_are_tested_against(compared, tmp_path, capsys, monkeypatch):
    """Finished runs are not trained again, and every difference equals the textbook formula."""
    out, against = tmp_path / "comparison", "control-conv"
    shutil.copytree(compared[0], out)
    monkeypatch.setattr(compare, "run_training", lambda *_: pytest.fail("trained again"))
    arguments = ["compare", *TINY, "--with", "plain,grc,grc:ratio=0.25", "--control", "conv,flops", "--seeds", "2"]
    assert main([*arguments, "--against", against, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "10 finished runs kept, 0 to train" in printed and f"reference {against}" in printed
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    values = {v["name"]: v["values"] for v in result["variants"]}
    assert result["reference"] == against
    by_name = {row["name"]: row for row in result["statistics"]}
    assert by_name.pop(against)["difference"] is None and len(by_name) == 4
    for name, row in by_name.items():
        mean, p = paired_by_hand(values[name], values[against])
        assert row["difference"]["mean"] == pytest.approx(mean, abs=1e-12), name
        assert row["p_value"] == pytest.approx(p), name
    assert f"difference to {against}" in (out / "report.html").read_text(encoding="utf-8")
    assert f"| difference to {against} |" in (out / "compare.md").read_text(encoding="utf-8")
    for content in ("", "[]", "{}", '{"steps": 3, "test": {}}'):
        (out / "plain" / "seed_1" / "summary.json").write_text(content, encoding="utf-8")
        assert main([*arguments, "--out", str(out)]) == 2
        assert f"{out / 'plain' / 'seed_1' / 'summary.json'} is damaged" in capsys.readouterr().err


def test_variants_may_have_several_memories_and_an_attention(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one fish, two fish. " * 400)
    recipe = load_config("demo_text", [f"data.path={path}"])
    names = ["plain", "gated_delta:carry=true", "streaming_llm:length=8+infini:update=gated_delta"]
    variants, _ = prepare(recipe, [*names, "gated_delta"], "window")
    assert variants.pop(3).name == "gated_delta"  # carries nothing
    plain, delta, pair, *windows = variants
    assert plain.config.model.get("memory") is None and "attention" not in plain.config.model
    assert delta.config.model["attention"] == {"name": "gated_delta", "carry": True}
    assert [memory["name"] for memory in pair.config.model["memory"]] == ["streaming_llm", "infini"]
    sizes = {v.name: nbytes(create_model(**v.config.model).eval().init_state(1)) for v in variants}
    assert [window.facts["matched"] for window in windows] == names[1:]
    for window in windows:
        assert "attention" not in window.config.model
        assert 0.8 < sizes[window.name] / sizes[window.facts["matched"]] <= 1
    refuses("one attention", prepare, recipe, ["linear+gated_delta"], "")


def test_each_variant_takes_the_value_that_validates_best(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["compare", recipe, "--with", "plain", "--out", str(out), "--seeds", "2"]
    arguments += ["--tune", "optimizer.learning_rate=1e-9,0.01"]
    assert main(arguments) == 0
    assert "plain: optimizer.learning_rate=0.01" in capsys.readouterr().out
    runs = sorted(str(path.parent.relative_to(out)) for path in out.rglob("summary.json"))
    rates = [f"plain_optimizer.learning_rate={rate}" for rate in ("0.01", "1e-9")]
    assert runs == [f"{rates[0]}/seed_0", f"{rates[0]}/seed_1", f"{rates[1]}/seed_0"]
    row = json.loads((out / "compare.json").read_text(encoding="utf-8"))["variants"][0]
    assert row["runs"] == runs[:2] and row["tuned"] == "optimizer.learning_rate=0.01"
    assert "learning_rate=0.01" in (out / "compare.md").read_text(encoding="utf-8")
    assert main(arguments) == 0 and "2 finished runs kept, 0 to train" in capsys.readouterr().out


def test_memory_can_be_emptied_and_shuffled(tmp_path, capsys):
    run = tmp_path / "run"
    more = ["model.memory=grc", "training.steps=30", "training.evaluate_every=30", "optimizer.learning_rate=0.01"]
    assert main(["train", *TINY, *more, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--memory", "carry,reset,shuffle", "--json"]) == 0
    carry, reset, shuffle = (row["loss"] for row in json.loads(capsys.readouterr().out)["scores"])
    assert len({carry, reset, shuffle}) == 3
    assert main(["evaluate", str(run), "--memory", "shuffle", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["loss"] == shuffle


def test_finished_runs_are_kept_and_the_comparison_grows(recipe, tmp_path, capsys, monkeypatch):
    trained = []
    original = compare.run_training

    def counting(config, folder, *rest):
        trained.append(str(folder.relative_to(tmp_path / "out")))
        if len(trained) == 2:
            raise OSError(28, "No space left on device")
        return original(config, folder, *rest)

    monkeypatch.setattr(compare, "run_training", counting)
    arguments = ["compare", recipe, "--with", "plain", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--seeds", "2"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert main([*arguments, "--seeds", "2"]) == 0
    assert "1 finished runs kept, 1 to train" in capsys.readouterr().out
    assert main([*arguments, "--seeds", "3"]) == 0
    assert trained == ["plain/seed_0", "plain/seed_1", "plain/seed_1", "plain/seed_2"]
    result = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))
    assert len(result["variants"][0]["values"]) == 3
    assert main([*arguments, "--seeds", "3", "optimizer.learning_rate=0.5"]) == 2
    assert "optimizer.learning_rate: 0.01 -> 0.5" in capsys.readouterr().err


def test_parallel_jobs_give_the_results_of_one_after_another(compared, tmp_path):
    out = tmp_path / "parallel"
    assert main(["compare", *TINY, "--with", "plain", "--seeds", "2", "--jobs", "2", "--out", str(out)]) == 0
    results = []
    for folder in (compared[0], out):
        results.append(json.loads((folder / "compare.json").read_text(encoding="utf-8"))["variants"][0]["values"])
        curves = [read_metrics(folder / "plain" / f"seed_{seed}" / "metrics.jsonl")[0]["loss"] for seed in (0, 1)]
        assert curves[0] != curves[1]
    assert results[0] == results[1]
    assert (out / "plain" / "seed_0" / "log.txt").read_text(encoding="utf-8").count("validation") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "plain,gcr"], "unknown memory 'gcr'; did you mean 'grc'"),
        (["--with", "grc:ratoi=1"], "option of memory 'grc' 'ratoi'; did you mean 'ratio'"),
        (["--with", "plain,plain"], "names a variant twice"),
        (["--with", "plain", "--control", "conf"], "unknown control 'conf'; did you mean 'conv'"),
        (["--with", "plain", "--control", "longer"], "--control longer is for streams of text"),
        (["--with", "plain", "--against", "grc"], "unknown variant of this comparison 'grc' (known: plain)"),
        (["--with", "plain,grc", "--against", "control-conv"], "(known: grc, plain); name one of them, or add it by"),
        (["--with", "plain", "--jobs", "0"], "--jobs 0 must be at least 1"),
        (["--with", "plain", "training.seed=3"], "set by --seeds"),
        (["--with", "plain", "--control", "flops"], "model.name='standin_mlp'"),
        (["--with", "plain+grc"], "plain has no memory; leave it out"),
        (["--with", "linear"], "'standin_mlp' must take it"),
        (["--with", "plain", "--tune", "optimizer.learning_rate=1"], "two values or more"),
        (["--with", "plain", "--tune", "optimizer.rate=1,2"], "optimizer.rate"),
        (["--with", "plain", "--tune", "training.seed=1,2"], "optimizer or schedule"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(recipe, tmp_path, capsys, arguments, message):
    assert main(["compare", recipe, "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_later_variant_that_cannot_be_built_is_refused_before_the_first_is_trained(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", *TINY, "--with", "plain,grc:ratio=0.2", "--seeds", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: variant grc:ratio=0.2: ratio=0.2 gives a cache of ")
    assert not out.exists()


@pytest.mark.parametrize("width", [None, 60])
def test_a_pipe_and_a_narrow_terminal_show_whole_names(capsys, width):
    names = [f"a_memory_with_a_long_name:option={n}:another_option={n}" for n in range(3)]
    written = StringIO()
    narrow = Console(file=written, width=60, force_terminal=True, color_system=None, highlight=False)
    table = ReportTable(["variant", *map(str, range(8))], [[name, *["0.51 [0.50, 0.52]"] * 8] for name in names])
    show(open_console() if width is None else narrow, table)
    printed = written.getvalue() or capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    if width is None:
        assert [line.split()[0] for line in printed.splitlines()[1:]] == names
