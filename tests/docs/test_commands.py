"""The commands of the README and the pages: all are taken by the real parser, and what is short is carried out."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest
from docs.made_folders import make_folders
from docs.pages import PROJECT, TEXTS, Block, blocks, commands, mentioned, typed

from cached_lab.cli.main import build_parser, main, parse
from cached_lab.experiments import compare
from cached_lab.experiments.probes.trials import Trial, Trials
from cached_lab.tasks.recipes import load_config

COMMANDS = [words for _, words in commands("cached")]
NOT_RUN = {
    "cached benchmark": "measures for minutes; tests/benchmarks/test_image_benchmarks.py",
    "cached detect": "needs a trained detector; tests/detection/test_training.py",
    "cached translate": "needs a trained translator; tests/translation/test_translate.py",
    "cached evaluate runs/rmt_documents": "needs a trained run; tests/documents/test_document_training.py",
    "cached evaluate runs/rmt_million_tokens": "needs a trained run; tests/documents/test_document_training.py",
    "cached evaluate runs/coco": "needs a trained detector; tests/detection/test_training.py",
    "cached evaluate runs/multi30k": "needs a trained translator; tests/translation/test_training.py",
    "cached evaluate RUN": "needs two trained runs; tests/analysis/test_memory_use.py",
    "cached leaderboard": "trains for minutes; tests/probes/test_board.py",
    "cached plan imagenet": "rehearses for a minute; tests/cli/test_plan.py",
    "cached plot fig1": "needs a finished comparison; tests/analysis/test_paper_figures.py",
    "cached fetch smollm2": "downloads; tests/real/test_names.py",
    "cached read smollm2": "reads for minutes; tests/cli/test_read.py",
    "cached fetch glass": "downloads; tests/real/test_names.py",
    "cached train distil": "needs a fetched model; tests/real/test_distilled.py",
    "cached read glass": "needs a fetched model; tests/real/test_distilled.py",
    "cached recommend": "needs a fetched model; tests/cli/test_recommend.py",
    "cached chat smollm2": "talks for minutes; tests/cli/test_chat.py",
    "cached probe armt armt.length=4": "trains for days at the paper's sizes; tests/probes/test_far.py",
    "cached probe rmt --tasks babilong": "reads bAbI and books; tests/probes/test_tasks.py",
    "cached reproduce table9": "measures for minutes; tests/cli/test_table9.py",
    "cached reproduce table1 --scale paper": "reads ImageNet; tests/cli/test_image_tables.py",
}
"""What commands begin with, and why they are parsed and no more; where they are run small."""
FAST = (["compare", "digits_vit_plain"], ["reproduce", "table5"])
"""Comparisons that are put together in a moment; others count the operations of many models."""
HERE = [words for words in COMMANDS if not any(" ".join(words).startswith(begin) for begin in NOT_RUN)]
OF_TEXT = [w for w in HERE if w[1] != "compare" and any(word.startswith(("demo_text", "runs/demo_text")) for word in w)]
"""What a page does with runs on a text, which it trains first."""
OF_DIGITS = [words for words in HERE if words[1] in ("evaluate", "plot") and words not in OF_TEXT]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folders(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def reader(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the commands read, and nothing that others have left behind."""
    for path in folders.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(*begins: str, plotting: bool = False) -> list[list[str]]:
    """Different commands that begin with one of these, with or without a picture to draw."""
    found = {" ".join(words): words for words in HERE if ("--plot" in words) == plotting}
    return [words for line, words in found.items() if line.startswith(begins)]


@pytest.mark.parametrize("page", TEXTS)
def test_the_parser_takes_every_command(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    for at, words in [*commands("cached"), *mentioned("cached")]:
        if at == page and len(words) > 2:
            try:
                parse(parser, words[1:])
            except SystemExit as stop:
                assert stop.code == 0, f"{' '.join(words)}: {capsys.readouterr().err}"  # 0 is that of --help
        elif at == page:
            assert words[1] in parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]


def test_every_command_is_run_or_has_its_reason() -> None:
    lines = [" ".join(words) for words in COMMANDS]
    assert [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in lines)] == []
    assert [why for why in NOT_RUN.values() if not (PROJECT / why.rpartition(" ")[2]).is_file()] == []
    kinds = {"explain", "plan", "train", "compare", "reproduce"}
    assert {words[1] for words in HERE if words not in (*OF_TEXT, *OF_DIGITS, *chosen("cached probe"))} == kinds


@pytest.mark.parametrize("words", chosen("cached list", "cached explain", "cached plan"), ids=" ".join)
def test_it_answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words[1:]) == 0 and len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(w, id=w[2], marks=[] if w[2] == "bigbird" else [pytest.mark.slow])
        for w in chosen("cached explain", plotting=True)
    ],
)
def test_it_draws(words: list[str], reader: Path) -> None:
    picture = reader / words[words.index("--plot") + 1]
    picture.parent.mkdir(parents=True, exist_ok=True)
    assert main(words[1:]) == 0 and picture.stat().st_size > 1000


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("words", chosen("cached train"), ids=" ".join)
def test_what_it_would_train_can_be_built(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words[1:], "--dry-run"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "# filled in from the data" in out and "is not known" not in out, out


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(w, id=" ".join(w), marks=[] if w[1:3] in FAST else [pytest.mark.slow])
        for w in chosen("cached compare", "cached reproduce")
    ],
)
def test_the_runs_that_it_would_compare_can_be_built(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out = []
    monkeypatch.setattr(compare, "carry_out", lambda comparison, *_: carried_out.append(comparison))
    assert main(words[1:]) == 0
    (comparison,) = carried_out
    assert len(comparison.variants) > 1
    if "--rows" in words and (rows := words[words.index("--rows") + 1]) != "all":
        assert [variant.name for variant in comparison.variants] == rows.split(",")


@pytest.mark.usefixtures("no_run_reports")
@pytest.mark.parametrize("page", ["docs/language-modelling.md"])
def test_a_text_is_trained_on_read_and_gone_on_with(
    page: str, reader: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("It was the best of times."))  # as a page redirects it
    lines = [words for at, words in commands("cached") if at == page and words in OF_TEXT]
    assert [words[1] for words in lines][:3] == ["train", "stream", "generate"]
    for words in lines:
        short = ["training.steps=2", "training.batch_size=2", "model.width=16"] if words[1] == "train" else []
        assert main([*words[1:], *short]) == 0, capsys.readouterr().err
    assert list((reader / "runs" / "demo_text").glob("stream_*.safetensors"))


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_runs_are_scored_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(OF_DIGITS) >= 2
    for folder in {word for words in OF_DIGITS for word in words if word.startswith("runs/")}:
        assert main(["train", "digits_vit_grc", "training.steps=2", "--out", folder]) == 0
    for words in OF_DIGITS:
        assert main(words[1:]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("words", chosen("cached probe"), ids=" ".join)
def test_memories_are_probed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words[1:], "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in words[2].split(","))


def demo() -> list[list[str]]:
    """The commands of `make demo`, as words."""
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    lines = [shlex.split(line) for line in re.split(r"\n|&&", recipe[1]) if line and "fetch" not in line]
    return [line[line.index("$(BIN)/cached") + 1 :] for line in lines]


def test_the_demo_begins_with_a_memory_and_ends_with_the_page() -> None:
    kinds = [words[0] for words in demo()]
    assert kinds[:2] == ["read", "probe"] and kinds[-1] == "plot" and "compare" in kinds
    assert parse(build_parser(), demo()[-1]).kind == "report"
    folders = {Path(words[words.index("--out") + 1]).parent for words in demo() if "--out" in words}
    assert folders == {Path(demo()[-1][-1])}


class Planned(Exception):
    """What a command would do."""


@pytest.mark.parametrize("words", demo()[1:-1], ids=lambda words: words[-1])
def test_the_demo_can_be_built(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are taken, and every training has its settings."""

    def planned(self: Trials, trials: list[Trial], *_: object) -> None:
        raise Planned([self.settings(trial) for trial in trials])

    def compared(comparison: compare.VariantComparison, *_: object) -> None:
        assert comparison.reference in {variant.name for variant in comparison.variants}
        raise Planned(comparison.variants)

    monkeypatch.setattr(Trials, "train", planned)
    monkeypatch.setattr(compare, "carry_out", compared)
    recipes = [str(PROJECT / word) if word.startswith("recipes/") else word for word in words]
    monkeypatch.chdir(tmp_path)
    arguments = parse(build_parser(), recipes)
    with pytest.raises(Planned) as found:
        arguments.run(arguments)
    assert len(found.value.args[0]) > 1


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=lambda block: block.name)
def test_recipes_are_taken(block: Block, tmp_path: Path) -> None:
    """Whole ones, and those of pairs of texts whose page shows the data alone."""
    recipe = tmp_path / "recipe.yaml"
    model = "" if "model:" in block.text else "model: {name: encoder_decoder}\n"
    recipe.write_text(block.text + model, encoding="utf-8")
    assert load_config(str(recipe), []).data["name"] in block.text


def test_programs_and_targets_of_pages_exist() -> None:
    programs = {words[0] for block in blocks("bash", "console") for words in typed(block.text)}
    assert programs <= {"cached", "cd", "echo", "git", "make", "pip", "python", "sacrebleu", "torchrun"}
    modules = [w[w.index("-m") + 1] for name in ("python", "torchrun") for _, w in commands(name) if "-m" in w]
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    called = [words for program in (commands("make"), mentioned("make")) for _, words in program]
    named = {word for words in called for word in words[1:] if "=" not in word}
    assert named and named - targets == set()
    variables = {word.partition("=")[0] for words in called for word in words[1:] if "=" in word}
    assert [name for name in variables if not re.search(rf"^{name} \?=", makefile, re.MULTILINE)] == []
