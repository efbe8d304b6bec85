"""Configuration: what is refused, with which words, and that YAML and overrides say what they seem to say."""

from __future__ import annotations

import copy

import pytest
import standin
import yaml

from cached_transformers.tasks.recipes import config_from_dict, fill_from_data, load_config
from cached_transformers.training.config import config_hash, config_to_dict, config_to_yaml, differing_keys
from cached_transformers.yaml_tree import apply_override, parse_yaml


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


def test_overrides_are_typed_as_yaml():
    config = build("training.steps=7", "optimizer.learning_rate=1e-4", "training.tensorboard=true")
    assert (config.training.steps, config.optimizer.learning_rate, config.training.tensorboard) == (7, 1e-4, True)


def test_a_bare_name_opens_up_for_an_option():
    tree = {"model": {"memory": "grc"}}
    apply_override(tree, "model.memory.ratio=0.25")
    assert tree == {"model": {"memory": {"name": "grc", "ratio": 0.25}}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.stesp=1", ["unknown key 'training.stesp'", "did you mean 'training.steps'"]),
        ("steps=1", ["unknown key 'steps'", "did you mean 'training.steps'"]),
        ("training.steps=many", ["training.steps='many'", "a whole number", "not str"]),
        ("training.steps=true", ["training.steps=True", "a whole number"]),
        ("training.steps=0", ["training.steps=0", "at least 1"]),
        ("training.clip_norm=no", ["training.clip_norm=False", "a number or null"]),
        ("training.precision=half", ["training.precision='half'", "'float32', 'bfloat16', 'float16'"]),
        ("training.accumulate=3", ["training.batch_size=8", "training.accumulate=3"]),
        ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1", "not be negative"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas=[0.9]", "two numbers"]),
        ("optimizer.learning_rate=.inf", ["optimizer.learning_rate=inf", "finite"]),
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
    ],
)
def test_bad_input_is_named_with_rule_and_way_out(override, parts):
    with pytest.raises(ValueError) as error:
        build(override)
    for part in parts:
        assert part in str(error.value)


def test_missing_section_and_broken_yaml_are_named(tmp_path):
    with pytest.raises(ValueError, match="section 'model' is missing"):
        config_from_dict({"data": {"name": "standin_rows"}})
    with pytest.raises(ValueError, match=r"r\.yaml is not valid YAML.*line 1"):
        parse_yaml("a: [1", "r.yaml")
    with pytest.raises(ValueError, match="'a' is given twice"):
        parse_yaml("a: 1\nb: 2\na: 3", "r.yaml")
    with pytest.raises(ValueError, match="unknown recipe 'digits_vit_grcc'; did you mean 'digits_vit_grc'"):
        load_config("digits_vit_grcc")


def test_the_model_learns_from_the_data_only_what_the_recipe_leaves_out():
    described = {"classes": 4, "image_size": 8}
    assert fill_from_data(build(), described).model == {"name": "standin_mlp", "classes": 4}
    assert fill_from_data(build("model.classes=9"), described).model["classes"] == 9
    with pytest.raises(ValueError, match=r"needs classes, which data 'standin_rows' does not tell"):
        fill_from_data(build(), {})


def test_a_memory_learns_from_the_data_where_sentences_end():
    described = {"vocabulary": 9, "sentence_ends": (1, 2), "paragraph_ends": ()}
    tree = standin.recipe()

    def memory(spec: object) -> object:
        config = config_from_dict({**tree, "model": {"name": "language_model", "memory": spec}})
        return fill_from_data(config, described).model["memory"]

    assert memory("segatron") == {"name": "segatron", "sentence_ends": [1, 2], "paragraph_ends": []}
    assert memory({"name": "segatron", "sentence_ends": [7]})["sentence_ends"] == [7]
    assert memory("transformer_xl") == "transformer_xl" and memory(None) is None


def test_keys_that_may_differ_between_resumptions_do_not_change_the_hash():
    old, new = build(), build("training.steps=99", "training.log_every=1", "training.keep=5")
    assert config_hash(old) == config_hash(new)
    assert differing_keys(config_to_dict(old), config_to_dict(new)) == []
    other = build("optimizer.learning_rate=0.5")
    assert config_hash(old) != config_hash(other)
    assert differing_keys(config_to_dict(old), config_to_dict(other)) == ["optimizer.learning_rate: 0.01 -> 0.5"]


def test_dumped_yaml_is_plain():
    assert yaml.safe_load(config_to_yaml(build()))["training"]["batch_size"] == 8
