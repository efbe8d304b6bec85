"""Variants of a comparison: memories and an attention by names and options, or a control without a memory.

Controls of equal cost raise a ValueError for a model whose feed-forward layers have no width to change, and for a
variant that cannot come within half a per cent.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cached_lab.experiments.build import build_dataset, build_model, refuse_what_cannot_be_built, with_memory
from cached_lab.tasks.kinds import baselines, example_inputs, model_arguments, task_name
from cached_lab.tasks.recipes import check_sections, config_from_dict, fill_from_data
from cached_lab.training.config import RunConfig, config_to_dict
from cached_lab.yaml_tree import apply_override, parse_yaml
from cached_transformers.registry import ATTENTIONS, MODELS, unknown_name
from cached_transformers.state import nbytes

from .costs.flops import count_flops, count_parameters
from .efficiency import window_of

CONTROLS = ("conv", "flops", "parameters", "longer", "window", "whole")
TOLERANCE = 0.005
"""Relative difference up to which sizes count as equal."""
FEED_FORWARD = ("feed_forward", "mlp_ratio", "mlp_ratios")
"""Model options for the width of feed-forward layers: channels; multiples of the width, of all stages or of each."""
UNIT = 1000
"""The width that keeps given ratios: they are changed in thousandths."""


@dataclass(frozen=True)
class Variant:
    """One arm of a comparison: its name, the recipe's configuration with its change, and a folder of another name."""

    name: str
    config: RunConfig
    facts: dict[str, Any] = field(default_factory=dict)
    folder: str = ""

    def seeded(self, seed: int) -> RunConfig:
        """Return the configuration of one run."""
        return dataclasses.replace(self.config, training=dataclasses.replace(self.config.training, seed=seed))

    def run_name(self, seed: int) -> str:
        """Return the folder of one run, relative to the comparison."""
        return f"{re.sub(r'[^A-Za-z0-9._=-]', '_', self.folder or self.name)}/seed_{seed}"


def parse_variant(text: str) -> str | dict[str, Any] | None:
    """Parse the `model.memory` of a variant: None for plain, a name, or a mapping for `name:key=value:key=value`.

    Raises:
        ValueError: an option is not of the form key=value.
    """
    name, *options = text.split(":")
    if name == "plain":
        if options:
            raise ValueError(f"variant {text!r}: plain has no memory, so it takes no options")
        return None
    memory: dict[str, Any] = {"name": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not (equals and key):
            raise ValueError(f"variant {text!r}: {option!r} is not of the form key=value, e.g. grc:ratio=0.25")
        memory[key] = parse_yaml(value, f"option {key} of variant {text}")
    return memory if options else name


def varied(recipe: RunConfig, text: str) -> RunConfig:
    """Return the recipe with the memories and the attention of a variant, which "+" joins.

    Raises:
        ValueError: as in `parse_variant`; a second attention, or one for a model that takes none.
    """
    parts = [parse_variant(part) for part in text.split("+")]
    names = [part["name"] if isinstance(part, Mapping) else part for part in parts]
    attentions = [part for part, name in zip(parts, names, strict=True) if name in ATTENTIONS]
    memories = [part for part, name in zip(parts, names, strict=True) if name not in ATTENTIONS and name]
    if None in names[1:] or (names[0] is None and len(names) > 1):
        raise ValueError(f"variant {text!r}: plain has no memory; leave it out")
    if len(attentions) > 1 or (attentions and "attention" not in MODELS.entry(recipe.model["name"]).options):
        raise ValueError(f"variant {text!r}: a model has one attention, and {recipe.model['name']!r} must take it")
    model = recipe.model | ({"attention": attentions[0]} if attentions else {})
    memory: Any = memories if len(memories) > 1 else memories[0] if memories else None
    return with_memory(dataclasses.replace(recipe, model=model), memory)


def tuned(variant: Variant, option: str, values: Sequence[str]) -> list[Variant]:
    """Return a variant once for each value of an option (ValueError: an unknown option, or a wrong value)."""
    found = []
    for choice in (f"{option}={value}" for value in values):
        tree = config_to_dict(variant.config)
        apply_override(tree, choice)
        facts = {**variant.facts, "tuned": choice}
        found.append(Variant(variant.name, config_from_dict(tree), facts, f"{variant.name}_{choice}"))
    return found


def prepare(
    recipe: RunConfig, names: list[str], controls: str, against: str = ""
) -> tuple[list[Variant], dict[str, float] | None]:
    """Return checked variants, controls last, and the baseline scores of the data set.

    Args:
        against: the variant or control that is the reference; "" for the default.

    Raises:
        ValueError: an unknown variant, option or control, a repeated variant, one that cannot be built, or an unknown
            `against`.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"--with {','.join(names)} names a variant twice")
    wanted = chosen_controls(controls, CONTROLS)
    for name in names:  # before the data are built, which may take long
        check_sections(varied(recipe, name))
    train = build_dataset(recipe, "train")
    scored = build_dataset(recipe, "validation" if recipe.training.test == "none" else "test")
    recipe = fill_from_data(recipe, train.describe())
    variants = [Variant(name, varied(recipe, name)) for name in names]
    if "conv" in wanted:
        variants.append(Variant("control-conv", with_memory(recipe, "convolution")))
    for variant in variants:  # before any is trained
        try:
            refuse_what_cannot_be_built(variant.config)
        except ValueError as error:
            raise ValueError(f"variant {variant.name}: {error}") from None
    named, plain = list(variants), with_memory(recipe, None)
    if "flops" in wanted:
        inputs, keywords = example_inputs(train, plain)
        variants.append(
            wider("flops", plain, named, lambda config: count_flops(build_model(config), *inputs, **keywords))
        )
    if "parameters" in wanted:
        variants.append(wider("parameters", plain, named, parameters_of))
    if "longer" in wanted:
        variants.append(longer(plain, train))
    if "window" in wanted:
        variants += windows(plain, [variant for variant in named if variant.name in names])
    if "whole" in wanted:
        variants.append(whole(plain, train, scored))
    if against and against not in (every := [variant.name for variant in variants]):
        unknown = unknown_name("variant of this comparison", against, every)
        raise ValueError(f"--against: {unknown}; name one of them, or add it by --with or --control")
    return variants, baselines(recipe, train, scored)


def chosen_controls(text: str, known: Sequence[str]) -> list[str]:
    """Parse `--control`: names separated by commas, or none (ValueError: an unknown one)."""
    wanted = [control for control in text.split(",") if control]
    for control in wanted:
        if control not in known:
            raise ValueError(f"--control: {unknown_name('control', control, list(known))}")
    return wanted


def wider(what: str, plain: RunConfig, variants: list[Variant], cost: Callable[[RunConfig], int]) -> Variant:
    """Widen the feed-forward layers of the plain model to the cost of the most expensive variant."""
    target = max(cost(variant.config) for variant in variants)
    found = with_cost(plain, cost, target)
    facts = {"feed_forward": feed_forward(found), f"{what}_ratio": cost(found) / target}
    return Variant(f"control-{what}", found, {**facts, "matched": "the most expensive variant"})


def longer(plain: RunConfig, dataset: Any) -> Variant:
    """Double the segment length of the plain model and halve the segments per step, in training and evaluation.

    Raises:
        ValueError: the data are no streams of text, or a step has an odd number of segments.
    """
    training, evaluation = plain.training, plain.evaluation
    if task_name(dataset) != "language":
        raise ValueError(
            f"--control longer is for streams of text, which data {plain.data['name']!r} are not; leave it out"
        )
    if training.segments % 2:
        raise ValueError(
            f"--control longer: training.segments={training.segments} must be even, so that half as many segments of "
            "twice the length are the same text"
        )
    length, segments = 2 * training.segment_length, training.segments // 2
    changed = dataclasses.replace(training, segment_length=length, segments=segments, bptt=min(training.bptt, segments))
    if evaluation.segment_length:
        evaluation = dataclasses.replace(evaluation, segment_length=2 * evaluation.segment_length)
    return Variant("control-longer", dataclasses.replace(plain, training=changed, evaluation=evaluation))


def windows(plain: RunConfig, variants: list[Variant]) -> list[Variant]:
    """Return the plain model with a window of as many bytes for each variant that carries a state and is no window.

    Raises:
        ValueError: a state is smaller than one slot of a window, or there is no memory but windows.
    """

    def build(config: RunConfig, carried: Any, memory: Any) -> torch.nn.Module:
        return refuse_what_cannot_be_built(config if memory is carried else with_memory(plain, memory))

    def size(config: RunConfig) -> int:
        model = refuse_what_cannot_be_built(config).eval()
        return nbytes(model.init_state(1)) if hasattr(model, "init_state") else 0  # type: ignore[operator]

    found, bare = [], size(plain)
    for name, config in ((variant.name, variant.config) for variant in variants):
        carried = config.model.get("memory") or config.model.get("attention")
        if config.model.get("memory") is None and size(config) <= bare:  # an attention that does not carry
            continue
        try:
            window = window_of(carried, functools.partial(build, config, carried))
        except ValueError as error:
            raise ValueError(f"--control window, variant {name}: {error}; leave out one of them") from None
        if window:
            found.append(Variant(f"control-window-{name}", with_memory(plain, window), {"matched": name}))
    if not found:
        raise ValueError("--control window: no memory of --with is other than a window; add one, or leave it out")
    return found


def whole(plain: RunConfig, train: Any, scored: Any) -> Variant:
    """Read each document in one segment, in training and evaluation.

    Raises:
        ValueError: the data are no documents, or change with the length of segments.
    """
    if task_name(train) == "documents":
        length = train.segment_length * max(d.segments for d in (train, scored, build_dataset(plain, "validation")))
        config = dataclasses.replace(plain, data={**plain.data, "segment_length": length, "segments": 1})
        same = build_dataset(config, scored.split)
        if all(torch.equal(scored.document(i)[0], same.document(i)[0]) for i in range(min(8, len(same)))):
            model = {**config.model, **({"max_length": length} if "max_length" in config.model else {})}
            training = dataclasses.replace(config.training, curriculum=None, passes=1)
            return Variant("control-whole", dataclasses.replace(config, model=model, training=training))
    raise ValueError(
        f"--control whole: data {plain.data['name']!r} must be documents that stay the same when data.segment_length "
        "changes; leave it out"
    )


def equal_parameters(variants: list[Variant], deciding: int) -> list[Variant]:
    """Set the width of feed-forward layers so that all variants have equally many parameters.

    Args:
        deciding: the largest of the first `deciding` variants keeps its size; larger ones after them become narrower.

    Returns:
        the variants, with the facts `feed_forward` and `matched_parameters`.
    """
    target = max(parameters_of(variant.config) for variant in variants[:deciding])
    equal = []
    for variant in variants:
        config, found = _matched(variant, parameters_of, target, "parameters")
        facts = {"feed_forward": feed_forward(config), "matched_parameters": found}
        equal.append(Variant(variant.name, config, facts))
    return equal


def equal_operations(variants: list[Variant], matched: Mapping[str, str], dataset: Any) -> list[Variant]:
    """Set the width of feed-forward layers of some variants so that training costs as much as another variant.

    Args:
        matched: name of the other variant by name of the variant.
        dataset: its first rows are the batch on which operations are counted.

    Returns:
        the variants, with the facts `feed_forward` and `training_flops` (one forward pass in training, per row), and
        for matched ones `matched` and `flops_ratio`.
    """

    @functools.cache
    def batch(config_batch_size: int) -> Any:
        return dataset.collate([dataset[index] for index in range(min(config_batch_size, len(dataset)))])

    def operations(config: RunConfig) -> int:
        return training_flops(config, batch(config.training.batch_size))

    costs = {v.name: operations(v.config) for v in variants if v.name not in matched or v.name in matched.values()}
    equal = []
    for variant in variants:
        config, cost, facts = variant.config, costs.get(variant.name, 0), dict[str, Any]()
        if variant.name in matched:
            target = costs[matched[variant.name]]
            config, cost = _matched(variant, operations, target, "operations")
            facts = {"matched": matched[variant.name], "flops_ratio": cost / target}
        size = min(config.training.batch_size, len(dataset))
        facts = {"feed_forward": feed_forward(config), "training_flops": round(cost / size), **facts}
        equal.append(Variant(variant.name, config, facts))
    return equal


def _matched(variant: Variant, cost: Callable[[RunConfig], int], target: int, what: str) -> tuple[RunConfig, int]:
    """Return a variant's configuration with the target cost, and its cost (ValueError if it differs)."""
    config = with_cost(variant.config, cost, target)
    found = cost(config)
    if abs(found - target) > TOLERANCE * target:
        raise ValueError(
            f"{variant.name} has {found} {what} with feed_forward={feed_forward(config)}, not {target}; take a larger "
            "model, or another memory"
        )
    return config, found


def training_flops(config: RunConfig, batch: Any) -> int:
    """Count the operations of one forward pass in training over a batch, by shapes only."""
    inputs, keywords = model_arguments(batch)
    return count_flops(build_model(config), *inputs, mode="train", shapes_only=True, **keywords)


def parameters_of(config: RunConfig) -> int:
    """Count the parameters of the configured model on the meta device."""
    with torch.device("meta"):
        return count_parameters(MODELS.create(**config.model))


def feed_forward_option(config: RunConfig) -> str:
    """Return the model's option for the width of its feed-forward layers.

    Raises:
        ValueError: there is none, or it is a ratio without a given value to start from.
    """
    model = MODELS.entry(config.model["name"])
    option = next((name for name in FEED_FORWARD if name in config.model or name in model.options), None)
    if option is None or (option != "feed_forward" and not config.model.get(option)):
        raise ValueError(
            f"model.name={model.name!r}: equal cost takes another width of feed-forward layers; set "
            f"{' or '.join(f'model.{name}' for name in (FEED_FORWARD if option is None else [option]))} to the "
            "model's value, if it has that option"
        )
    return option


def feed_forward(config: RunConfig) -> Any:
    """Return the configured width of the feed-forward layers; None if there is none."""
    return next((config.model[option] for option in FEED_FORWARD if config.model.get(option) is not None), None)


def widened(config: RunConfig, width: int) -> RunConfig:
    """Set the width of the feed-forward layers: channels, or thousandths of the given ratios."""
    option = feed_forward_option(config)
    value: Any = width
    if option != "feed_forward":
        given = config.model[option]
        value = [width * r / UNIT for r in given] if isinstance(given, (list, tuple)) else width * given / UNIT
    return dataclasses.replace(config, model={**config.model, option: value})


def with_cost(config: RunConfig, cost: Callable[[RunConfig], int], target: int) -> RunConfig:
    """Set the feed-forward width with the cost nearest to `target`."""
    unit = 1 if feed_forward_option(config) == "feed_forward" else UNIT
    return widened(config, nearest_width(lambda w: cost(widened(config, w)), target, unit))


def nearest_width(cost: Callable[[int], int], target: int, unit: int = 1) -> int:
    """Return the width with the cost nearest to `target`; cost is linear in width, measured at one and two units."""
    base = cost(unit)
    slope = (cost(2 * unit) - base) / unit
    return max(1, unit + round((target - base) / slope))
