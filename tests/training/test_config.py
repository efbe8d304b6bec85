"""Configuration: refused values and their messages, YAML and overrides."""

from __future__ import annotations

import copy
import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import standin
import yaml
from common import refuses
from torch import nn

from cached_lab.registries import DATASETS, LISTED
from cached_lab.tasks.recipes import config_from_dict, fill_from_data, load_config
from cached_lab.training.config import RunConfig, config_hash, config_to_dict, config_to_yaml, differing_keys
from cached_lab.training.optim import OptimizerConfig
from cached_lab.yaml_tree import apply_override, parse_yaml
from cached_transformers import create_model
from cached_transformers.annotations import check_type, hints_of, understood
from cached_transformers.memories.memorizing import Memorizing
from cached_transformers.registry import ATTENTIONS, MEMORIES


def build(*overrides: str):
    tree = copy.deepcopy(standin.recipe())
    for override in overrides:
        apply_override(tree, override)
    return config_from_dict(tree)


def test_yaml_round_trip_keeps_the_configuration(tmp_path):
    config = build("optimizer.betas=[0.9, 0.98]", "training.tensorboard=auto", "training.clip_norm=null")
    path = tmp_path / "standin.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert config_to_dict(again) == config_to_dict(config)
    assert config_hash(again) == config_hash(config)


def test_overrides_are_typed_names_open_up_and_dumps_are_plain():
    config = build("training.steps=7", "optimizer.learning_rate=1e-4", "training.tensorboard=true")
    assert (config.training.steps, config.optimizer.learning_rate, config.training.tensorboard) == (7, 1e-4, True)
    tree = {"model": {"memory": "grc"}}
    apply_override(tree, "model.memory.ratio=0.25")
    assert tree == {"model": {"memory": {"name": "grc", "ratio": 0.25}}}
    assert yaml.safe_load(config_to_yaml(build()))["training"]["batch_size"] == 8
    assert parse_yaml("2024-01-01", "x") == "2024-01-01"


def test_a_memory_of_a_recipe_may_be_a_preset():
    chosen = ["model.memory.name=memorizing", "model.memory.preset=long", "model.memory.length=8"]
    config = load_config("demo_text", chosen)
    assert config.model["memory"] == {"name": "memorizing", "preset": "long", "length": 8}
    built = create_model(**{**config.model, "vocabulary": 5})
    assert {m.length for m in built.modules() if isinstance(m, Memorizing)} == {8}
    assert any(bool((p == 10).all()) for name, p in built.named_parameters() if "scale" in name)
    with pytest.raises(ValueError, match=r"'memorizing'.*'lang'.*'long'"):
        load_config("demo_text", ["model.memory.name=memorizing", "model.memory.preset=lang"])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.stesp=1", ["unknown key 'training.stesp'", "did you mean 'training.steps'"]),
        ("training.steps=many", ["training.steps='many'", "a whole number", "not str"]),
        ("training.steps=true", ["training.steps=True", "a whole number"]),
        ("training.steps=0", ["training.steps=0", "at least 1"]),
        ("training.clip_norm=no", ["training.clip_norm=False", "a number or null"]),
        ("training.precision=half", ["training.precision='half'", "'float32', 'bfloat16', 'float16'"]),
        ("training.accumulate=3", ["training.batch_size=8", "training.accumulate=3"]),
        ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1", "not be negative"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas=[0.9]", "tuple[float, float]"]),
        ("optimizer.learning_rate=.inf", ["optimizer.learning_rate=inf"]),
        ("training=3", ["training=3 must be a mapping"]),
        ("model.widht=3", ["option of model 'standin_mlp' 'widht'", "did you mean 'width'"]),
        ("model.width=wide", ["model.width='wide'", "a whole number"]),
        ("model.name=standin_mpl", ["unknown model 'standin_mpl'", "did you mean 'standin_mlp'"]),
        ("data.name=standin", ["unknown dataset 'standin'", "standin_rows"]),
        ("data.split=train", ["data.split", "training and evaluation choose"]),
        ("model.memory=gcr", ["unknown memory 'gcr'", "did you mean 'grc'"]),
        ("training.steps.x=1", ["training.steps is 12", "no options"]),
        ("training.steps", ["key=value"]),
        ("name=a/b", ["name='a/b'", "folder"]),
        ("training.seed=99999999999999999999", ["training.seed=", "a whole number", "64 bits"]),
        ("training.clip_norm=.nan", ["training.clip_norm=nan", "a number"]),
        ("training.steps=!!bool x", ["training.steps", "'x' is no bool"]),
        ("training.steps=!!timestamp x", ["training.steps", "timestamp", "not supported"]),
        ("model.width=&a [*a]", ["model.width", "alias"]),
        ('description="\\0"', ["description", "null character"]),
        ("description=2024-01-01 00:00:00\n---\n2", ["description is not valid YAML"]),
    ],
)
def test_bad_input_is_named_with_rule_and_way_out(override, parts):
    with pytest.raises(ValueError) as error:
        build(override)
    for part in parts:
        assert part in str(error.value)


def test_sizes_are_of_the_data_and_fit_them():
    described = {"classes": 4, "image_size": 8}
    assert fill_from_data(build(), described).model == {"name": "standin_mlp", "classes": 4}
    assert fill_from_data(build("model.classes=9"), described).model["classes"] == 9
    refuses("'standin_rows'", fill_from_data, build(), {})
    refuses(r"model\.classes=3.*'standin_rows'.*classes=4", fill_from_data, build("model.classes=3"), {"classes": 4})
    text = build("model={name: language_model, vocabulary: 5}")
    refuses(r"model\.vocabulary=5.*vocabulary=9", fill_from_data, text, {"vocabulary": 9})
    images = build("model={name: vision_transformer, patch_size: 2, channels: 3}")
    refuses(r"model\.channels=3.*channels=1", fill_from_data, images, {"image_size": 8, "channels": 1, "classes": 2})


def test_a_memory_learns_from_the_data_where_sentences_end():
    described = {"vocabulary": 9, "sentence_ends": (1, 2), "paragraph_ends": ()}
    tree = standin.recipe()

    def memory(spec: object) -> object:
        config = config_from_dict({**tree, "model": {"name": "language_model", "memory": spec}})
        return fill_from_data(config, described).model["memory"]

    assert memory("segatron") == {"name": "segatron", "sentence_ends": [1, 2], "paragraph_ends": []}
    assert memory({"name": "segatron", "sentence_ends": [7]})["sentence_ends"] == [7]
    assert memory("transformer_xl") == "transformer_xl" and memory(None) is None


@pytest.mark.parametrize("registry", LISTED.values(), ids=lambda registry: registry.kind)
def test_every_annotation_of_every_part_is_understood(registry):
    for entry in registry:
        for name, annotation in hints_of(entry.factory).items():
            assert understood(annotation), f"{entry.name}: {name}: {annotation}"
    for section in typing.get_type_hints(RunConfig).values():
        assert understood(section)
        for annotation in typing.get_type_hints(section).values() if dataclasses.is_dataclass(section) else ():
            assert understood(annotation)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (Path, ["a", Path("a")], [2024, None, "a\0b", {}, ["a"]]),
        (str | Path | Mapping[str, str | Path], ["a", {"train": "b"}], [3, None, {"train": 3}, {1: "b"}, ["a"]]),
        (Sequence[int], [[], [1, 2], (3,)], [7, "12", None, [1, "2"], [True], {1: 2}, [2**63]]),
        (Sequence[int] | Sequence[Sequence[int]], [[1], [[1], [2, 3]]], [[[1], 2], [[[1]]], 1]),
        (tuple[int, int] | None, [[1, 2], None], [[1], [1, 2, 3], [1.5, 2], 1]),
        (tuple[int, ...], [[], [1, 2, 3]], [["a"], 1]),
        (dict[str, Any], [{}, {"a": object()}], [{1: 2}, [], "a"]),
        (Iterable[str], [["a"]], ["a", [1], 1]),
        (Literal["auto", True], ["auto", True], [1, "true", None]),
        (float, [1, 0.5, math.inf], [math.nan, True, "1", 2**63]),
        (Callable[[int], int], [len], ["len", 1]),
        (nn.Module | None, [None, nn.Identity()], [1, "relu", {}]),
        (OptimizerConfig, [OptimizerConfig()], [{"name": "sgd"}, "sgd"]),
        (Any, [1, None, "a"], []),
    ],
)
def test_values_fit_annotations(annotation, right, wrong):
    assert understood(annotation)
    for value in right:
        assert check_type("x", value, annotation) == value
    for value in wrong:
        refuses(r"^x=.* must be ", check_type, "x", value, annotation)


def test_what_is_not_understood_is_refused_and_some_keys_may_differ():
    def factory(unknown: Absent, known: int, anything=None) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    hints = hints_of(factory)
    refuses("unknown=3", check_type, "unknown", 3, hints["unknown"])
    assert check_type("anything", 3, hints["anything"]) == 3
    assert not understood(TypeVar("T"))
    old, new = build(), build("training.steps=99", "training.log_every=1", "training.keep=5")
    assert config_hash(old) == config_hash(new)
    assert differing_keys(config_to_dict(old), config_to_dict(new)) == []
    other = build("optimizer.learning_rate=0.5")
    assert config_hash(old) != config_hash(other)
    assert differing_keys(config_to_dict(old), config_to_dict(other)) == ["optimizer.learning_rate: 0.01 -> 0.5"]


@pytest.mark.parametrize("path", ["2024", "2024.5", "null", "true", "{train: 3}", "[a]"])
@pytest.mark.parametrize("name", [e.name for e in DATASETS if "path" in e.options and not e.name.startswith("standin")])
def test_a_path_is_text(name, path):
    optional = "None" in str(hints_of(DATASETS.entry(name).factory)["path"])
    if optional and path == "null":
        return
    refuses(r"data\.path", build, f"data={{name: {name}, path: {path}}}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.attention={name: longformer, global_tokens: 7}", r"global_tokens=7 must be"),
        ("model.memory={name: segatron, widths: 7}", r"model\.memory\.widths=7 must be"),
        ("model.memory={name: segatron, sentence_ends: [a]}", r"model\.memory\.sentence_ends=\['a'\]"),
    ],
)
def test_lists_are_lists(override, message):
    tree = {**standin.recipe(), "model": {"name": "language_model"}}
    apply_override(tree, override)
    refuses(message, config_from_dict, tree)


@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_what_the_model_gives_is_no_option(kind):
    registry = {"memory": MEMORIES, "attention": ATTENTIONS}[kind]
    for entry in registry:
        if entry.name.startswith("test_"):
            continue
        for option in registry.given:
            tree = {**standin.recipe(), "model": {"name": "language_model", kind: {"name": entry.name, option: 2}}}
            refuses(rf"model\.{kind}\.{option}=2 is set by the model", config_from_dict, tree)
        assert not {line.partition(":")[0] for line in entry.facts()["options"]} & {*registry.given}


def test_large_and_deep_yaml_is_refused_and_many_keys_are_read():
    refuses(r"r .*alias.*line 2", parse_yaml, "a: &a [1]\nb: *a", "r")
    refuses("r nests lists or mappings too deeply", parse_yaml, "[" * 3000, "r")
    refuses("1,000,001", parse_yaml, "a" * 1_000_001, "r")
    assert len(parse_yaml("\n".join(f"k{i}: {i}" for i in range(3000)), "r")) == 3000
    refuses(r"x\.x.* nested keys", apply_override, {}, ".".join("x" * 60) + "=1")


def test_a_recipe_is_text_of_known_sections(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes("name: größe".encode("latin-1"))
    refuses(r"r\.yaml.*byte 8", load_config, path)
    path.write_bytes("name: x".encode("utf-16"))
    refuses(r"r\.yaml.*UTF-16", load_config, path)
    refuses("unknown recipe", load_config, tmp_path)
    refuses("'model'", config_from_dict, {"data": {"name": "standin_rows"}})
    refuses(r"r\.yaml", parse_yaml, "a: [1", "r.yaml")
    refuses("'a' is given twice", parse_yaml, "a: 1\nb: 2\na: 3", "r.yaml")
    refuses(r"'digits_vit_grcc'.*'digits_vit_grc'", load_config, "digits_vit_grcc")
