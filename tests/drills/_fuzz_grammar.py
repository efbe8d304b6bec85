"""Random recipes and command lines, from a grammar of the registries and the parser.

An `Input` follows from its seed. It is a command line, possibly with a recipe.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import typing
from pathlib import Path
from typing import Any

import yaml

from cached_lab.cli.arguments import NEEDS
from cached_lab.registries import DATASETS, OBJECTIVES
from cached_lab.resources import recipes_folder
from cached_lab.training.config import RunConfig
from cached_transformers.annotations import hints_of
from cached_transformers.registry import ATTENTIONS, MEMORIES, MODELS, Registry

from . import _damage
from ._fuzz_values import OTHER, REAL, TRICKS, WHOLE, Text, as_yaml, drawn, fitting, words_of

STACK = {"width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
TRAINING = {"steps": 1, "batch_size": 4, "evaluate_every": 1, "log_every": 1, "tensorboard": False, "device": "cpu"}
TRAINING |= {"evaluation_batch_size": 8}
TEXT = {"segment_length": 8, "segments": 2, "metric": "loss"}
DROPPED = ("split",)
"""Options that nobody may set are set as often as others, but for these, of which every part would be refused."""


@dataclasses.dataclass
class Input:
    """A command line.

    Attributes:
        argv: words. recipe: bytes of `recipe.yaml` in the working folder, if any.
        touched: random keys and words, one of which a message must name. refused: exit status 2 is the only right one.
    """

    argv: list[str]
    recipe: bytes | None = None
    touched: list[str] = dataclasses.field(default_factory=list)
    kind: str = ""
    refused: bool = False

    def __str__(self) -> str:
        text = "" if self.recipe is None else f"\nrecipe.yaml: {self.recipe[:1500]!r}"
        return f"[{self.kind}] cached {' '.join(map(repr, (word[:300] for word in self.argv)))}{text}"


def bases(shared: Path) -> dict[str, dict[str, Any]]:
    """Small recipes that are right, one of each kind of task; their data lie in `shared`."""
    text = {"name": "text", "path": str(shared / "text"), "tokenizer": "byte"}
    pairs = {
        "name": "translation",
        "source": "de",
        "target": "en",
        "path": str(shared / "pairs"),
        "vocabulary_size": 280,
    }
    lists = {"max_depth": 3, "max_args": 3, "min_length": 4, "max_length": 24}
    lists |= {"train_size": 16, "validation_size": 8, "test_size": 8}
    detector = {"min_size": 32, "max_size": 64, "fpn_channels": 8, "backbone": "pvt_v2_b0"}
    return {
        "images": {"data": {"name": "digits"}, "model": {"name": "vision_transformer", "patch_size": 4, **STACK}},
        "text": {"data": text, "model": {"name": "language_model", **STACK}, "training": TEXT},
        "lists": {"data": {"name": "listops", **lists}, "model": {"name": "sequence_classifier", **STACK}},
        "pairs": {
            "data": {**pairs, "max_length": 64},
            "model": {"name": "encoder_decoder", **STACK},
            "training": {"metric": "loss"},
        },
        "denoising": {
            "data": {"name": "denoising", "path": str(shared / "text"), "max_length": 32, "vocabulary_size": 280},
            "model": {"name": "encoder_decoder", **STACK},
            "training": {"metric": "loss"},
        },
        "detection": {
            "data": {"name": "coco", "path": str(shared / "coco"), "masks": False},
            "model": {"name": "retinanet", **detector},
            "training": {"metric": "box_ap", "test": "none", "batch_size": 2},
        },
        "timm": {"data": {"name": "digits"}, "model": {"name": "timm", "architecture": "pvt_v2_b0", "in_chans": 1}},
        "transformers": {
            "data": text,
            "model": {"name": "transformers", "n_embd": 8, "n_layer": 1, "n_head": 2},
            "training": TEXT,
        },
    }


def tree_of(base: dict[str, Any]) -> dict[str, Any]:
    """A whole recipe of one of the bases."""
    whole = copy.deepcopy(base)
    whole["training"] = {**TRAINING, **base.get("training", {})}
    return {"name": "fuzzed", **whole}


class Grammar:
    """Draws inputs.

    Args:
        shared: folder with data and trained runs, as `fuzz.prepare` makes it. parser: of the command.
    """

    def __init__(self, shared: Path, parser: argparse.ArgumentParser) -> None:
        self.shared = shared
        self.bases = bases(shared)
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        self.commands: dict[str, argparse.ArgumentParser] = dict(commands.choices)
        self.paths = [
            str(shared / name) for name in ("text", "pairs", "coco", "absent", "text/train.txt", "binary.bin")
        ]
        self.runs = ["runs/images", "runs/text", "runs/pairs", "runs/absent"]
        self.recipes = sorted(recipes_folder().glob("*.yaml"))

    def draw(self, seed: str) -> Input:
        """One input."""
        rng = random.Random(seed)
        kinds = {self.options: 64, self.command: 18, self.text: 9, self.misused: 9}
        return rng.choices(list(kinds), list(kinds.values()))[0](rng)

    def options(self, rng: random.Random) -> Input:
        """A small recipe with a memory, an attention, and some options changed, right or wrong."""
        base = rng.choice(list(self.bases))
        tree, wrong = tree_of(self.bases[base]), rng.choice([0.0, 0.3, 1.0])
        touched: list[str] = []
        changes: list[tuple[str, Any]] = []
        if rng.random() < 0.2:
            tree["data"] = self.source(rng)
            touched += ["data", *tree["data"], *map(str, tree["data"].values())]
        if rng.random() < 0.75:
            tree["model"]["memory"], more = self.part(MEMORIES, rng, wrong)
            changes += [(f"model.memory.{key}", value) for key, value in more]
        if rng.random() < 0.45 and base not in ("detection", "timm", "transformers"):
            tree["model"]["attention"], more = self.part(ATTENTIONS, rng, wrong)
            changes += [(f"model.attention.{key}", value) for key, value in more]
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            changes.append(self.change(tree, rng, wrong))
        if base == "denoising" and rng.random() < 0.5:
            tree["data"]["objective"], more = self.part(OBJECTIVES, rng, wrong)
            changes += [(f"data.objective.{key}", value) for key, value in more]
        touched += [key.strip() for key, _ in changes] + [str(value) for _, value in changes if isinstance(value, str)]
        touched += [str(tree["model"][key]) for key in ("memory", "attention") if key in tree["model"]]
        return self.written(tree, changes, touched, rng, "options")

    def part(self, registry: Registry[Any], rng: random.Random, wrong: float) -> tuple[Any, list[tuple[str, Any]]]:
        """A name, and options of that part."""
        entry = registry.entry(rng.choice(registry.names()))
        known = hints_of(entry.factory)
        words = words_of(entry.factory)
        names = [name for name in entry.options if wrong or name not in ("width", "heads", "depth", "index", "facts")]
        names = [name for name in names if wrong or name not in ("causal", "norm")]
        chosen = rng.sample(names, min(len(names), rng.choice([0, 1, 1, 2, 3])))
        found = [(name, drawn(known.get(name, Any), rng, words, self.paths, wrong / 2)) for name in chosen]
        return entry.name, found

    def change(self, tree: dict[str, Any], rng: random.Random, wrong: float) -> tuple[str, Any]:
        """One option of the data, of the model, or of a section."""
        section = rng.choice(["data", "model", "model", "training", "training", "optimizer", "schedule", "evaluation"])
        if section in ("data", "model"):
            entry = (DATASETS if section == "data" else MODELS).entry(tree[section]["name"])
            known, words, name = hints_of(entry.factory), words_of(entry.factory), rng.choice(list(entry.options))
            if wrong == 0 and name in ("split", "path", "image_size", "channels", "source", "target"):
                name = next(n for n in entry.options if n not in DROPPED)
        else:
            factory = typing.get_type_hints(RunConfig)[section]
            known, words = typing.get_type_hints(factory), []
            name = rng.choice([field.name for field in dataclasses.fields(factory)])
        if rng.random() < 0.1 * wrong:
            name = near(name, rng)
        return f"{section}.{name}", drawn(known.get(name, Any), rng, words, self.paths, wrong)

    def written(
        self, tree: dict[str, Any], changes: list[tuple[str, Any]], touched: list[str], rng: random.Random, kind: str
    ) -> Input:
        """Return the command line, with changes in the recipe or as overrides."""
        words = []
        for key, value in changes:
            if rng.random() < 0.5 or isinstance(value, Text) or (key.count(".") > 1 and isinstance(value, Text)):
                words.append(f"{key}={as_yaml(value)}")
                continue
            node, *rest = tree, *key.split(".")
            for part in rest[:-1]:
                if not isinstance(node.get(part), dict):
                    node[part] = {"name": node[part]} if isinstance(node.get(part), str) else {}
                node = node[part]
            node[rest[-1]] = value
        recipe = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
        argv = ["train", "recipe.yaml", *words]
        argv.insert(rng.randrange(1, len(argv) + 1), "--dry-run")
        return Input(argv, recipe, touched, kind)

    def source(self, rng: random.Random) -> dict[str, Any]:
        """Any data source with the options that it needs, on data that are its own, another's, or none."""
        entry = DATASETS.entry(rng.choice(DATASETS.names()))
        known, words = hints_of(entry.factory), words_of(entry.factory)
        needed = [name for name, p in entry.options.items() if p.default is p.empty and name not in DROPPED]
        small = self.bases["lists"]["data"] if entry.name == "listops" else {}  # by default it makes 100,000
        found = {name: fitting(known.get(name, Any), rng, words, self.paths) for name in needed}
        return {**found, **small, "name": entry.name}

    def text(self, rng: random.Random) -> Input:
        """The text of a recipe, damaged."""
        if rng.random() < 0.5:
            text = yaml.safe_dump(tree_of(rng.choice(list(self.bases.values()))), sort_keys=False)
        else:
            text = rng.choice(self.recipes).read_text(encoding="utf-8")
        raw = damaged(text, rng)
        argv = [
            "train",
            rng.choice(["recipe.yaml"] * 12 + [".", "/", "/dev/null", "absent.yaml", "", "digits_vit_grcc"]),
        ]
        return Input([*argv, "--dry-run"], raw, [], "text")

    def command(self, rng: random.Random) -> Input:
        """Any command with any of its options: right, wrong, doubled, missing, unknown."""
        name = rng.choice(list(self.commands))
        words: list[str] = []
        for action in self.commands[name]._actions:
            if action.dest in ("help", "debug"):
                continue
            given = not action.option_strings or action.required
            if rng.random() > (0.95 if given else 0.25):
                continue
            for _ in range(2 if rng.random() < 0.04 else 1):
                words += [rng.choice(action.option_strings)] if action.option_strings else []
                words += [self.word(action, rng) for _ in range(amount(action, rng))]
        luck = rng.random()
        if luck < 0.04:
            words.insert(
                rng.randrange(len(words) + 1), rng.choice(["--unknown", "-x", "--", "--hepl", "\u202e", "--out"])
            )
        if luck > 0.97:
            name = near(name, rng)
        if name == "train":
            words.append("--dry-run")
        recipe = yaml.safe_dump(tree_of(rng.choice(list(self.bases.values())))).encode()
        return Input([name, *words], recipe, [], "command")

    def misused(self, rng: random.Random) -> Input:
        """A misspelt option, or one without the option that it belongs to, in an otherwise right command line."""
        if rng.random() < 0.5:
            name = rng.choice([name for name in self.commands if name != "benchmark"])
            option = rng.choice([o for a in self.commands[name]._actions for o in a.option_strings if o[:2] == "--"])
            at = rng.randrange(3, len(option) + 1)
            words = [f"{option[:at]}q{option[at:]}"]
        else:
            name = rng.choice(list(NEEDS))
            options, other, word, _ = rng.choice(NEEDS[name])
            known = {action.dest: action for action in self.commands[name]._actions}
            action = known[rng.choice(options.split())]
            value = {int: "7", float: "0.25", type(None): "x"}.get(action.type, "x")
            words = [*action.option_strings[:1], *([] if action.nargs == 0 else [value])]
            if word == "None":
                words += [known[other].option_strings[0], (known[other].choices or ["1..2"])[0]]
        wanted = [a for a in self.commands[name]._actions if not a.option_strings and a.nargs not in ("*", "?")]
        given = [str(a.choices[0]) if a.choices else "x" for a in wanted]
        return Input([name, *given, *words], None, [words[0]], "misused", refused=True)

    def word(self, action: argparse.Action, rng: random.Random) -> str:
        """One word where an option takes one."""
        if action.dest in ("out", "output", "state", "plot"):
            return rng.choice(
                ["new.out", "new/figure.png", "figure.svg", "x.pdf", "", ".", "é🙂", "x" * 300, "\udcff", "a\x00b"]
            )
        luck = rng.random()
        if luck < 0.1:
            return str(rng.choice([*OTHER, *WHOLE, *REAL, *TRICKS]))
        if luck < 0.14:
            return rng.choice(["", "é🙂", "x" * 5000, "a b", "a,b", ",", "-1", "..", "\udcff"])
        if action.choices:
            return str(rng.choice(list(action.choices)))
        if action.type is int or action.type is float:
            return str(rng.choice([1, 2, 3, 0, -1, 0.5, 10**12]))
        names = [*MEMORIES.names(), *ATTENTIONS.names(), *MODELS.names(), *DATASETS.names()]
        by_dest = {
            "recipe": "recipe.yaml digits_vit_grc absent",
            "overrides": "training.steps=1 model.width=8 x=1 model.memory=grc index=1 window=4 latch.classes=2 = a",
            "reproduction": "table1 table5 table6 table9 table10 tabel1",
            "device": "cpu cuda cuda:9 meta xpu auto tpu",
            "checkpoint": "best last tested absent .",
            "variants": "plain,grc plain grc:ratio=1 grc:ratio grc,grc plain:x=1 gcr",
            "memory": "carry reset,shuffle batch other carry,",
            "memories": "grc_stream transformer_xl,rmt all gcr",
            "tasks": "latch copy,recall babilong x",
            "models": "ViT-S x",
            "attentions": "all linear,softmax x",
            "control": "conv flops conv,flops x",
            "seeds": "3 0,1 0 -1 1,1 x 999999999999",
            "rows": "paper all x",
            "threshold": "0.5 2 nan",
        }
        if action.dest in by_dest:
            return rng.choice(by_dest[action.dest].split())
        lists = {"name": names, "folder": self.runs, "folders": self.runs}
        return rng.choice(lists.get(action.dest, [*self.paths, "new.out", "new/figure.png", "figure.svg"]))


def amount(action: argparse.Action, rng: random.Random) -> int:
    """Return the number of words after an option."""
    if action.nargs == 0:
        return 0
    if action.nargs in ("*", "+", "?"):
        return rng.choice([0, 1, 1, 2]) if action.nargs != "?" else rng.choice([0, 1, 1])
    return 1 if rng.random() < 0.98 else 0


def near(name: str, rng: random.Random) -> str:
    """A name with a slip of the pen."""
    at = rng.randrange(len(name))
    return rng.choice(
        [name[:at] + name[at + 1 :], name[:at] + name[at:][::-1], name.upper(), f"{name} ", f"{name}é", ""]
    )


def damaged(text: str, rng: random.Random) -> bytes:
    """A recipe's bytes after an accident: a value that is none, a line of another form, or damage as of any file."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    trick = rng.choice([rng.choice(TRICKS), as_yaml(rng.choice([*OTHER, *WHOLE, *REAL]))])
    if rng.random() < 0.5:
        lines[at] = f"{lines[at].partition(':')[0]}: {trick}"
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        wrong = [
            "--- a",
            "%TAG ! x",
            "- list",
            "text",
            "---\n---",
            "{",
            "? a\n: b",
            "\x00",
            "a: |\n  b",
            f"\tx: {trick}",
        ]
        lines.insert(
            at, rng.choice([*wrong, "a: &a [x]\nb: [*a]", "[" * 2000, "\n".join(f"k{i}: {i}" for i in range(30_000))])
        )
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    return _damage.damaged(text.encode(), ".yaml", rng)


__all__ = ["Grammar", "Input", "bases", "fitting", "tree_of"]
