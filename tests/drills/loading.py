"""Drill: a saved model with a memory, loaded in a random way with random options, with this package and without it.

A case is a seed. Plain transformers decides: the same call with the host's own folder, and the memory added by hand.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from integrations import families
from integrations.family_checks import KINDS, RECENT, SHARED, STREAMS
from integrations.transformers_hosts import awaken, byte_tokenizer
from torch import Tensor
from torch.utils import _pytree

from cached_transformers import add_memory, load_pretrained

from .frame import Drill, Failure

NAMES = ("gpt2", "llama", "qwen2", "mistral", "gemma3_text", "bert", "distilbert", "roberta", "t5", "bart", "vit")
HOSTS = {family.name: family for family in families.ALL if family.name in (*NAMES, "clipvision")}
HEADS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "Seq2SeqLM", "ImageClassification")
AUTO = ("AutoModel", *(f"AutoModelFor{head}" for head in HEADS))
WRITES = {"CausalLM": "text-generation", "MaskedLM": "fill-mask"}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "attn_implementation": ("eager", "sdpa"),
    "dtype": (torch.bfloat16, torch.float32, "auto"),
    "num_labels": (2, 3),
    "output_hidden_states": (True,),
    "use_cache": (False, True),
    "attention_dropout": (0.25,),
    "tie_word_embeddings": (False, True),
    "device_map": ("cpu",),
    "low_cpu_mem_usage": (True,),
    "output_loading_info": (True,),
    "not_an_option": (1,),
}
FORMS = ("folder", "subfolder", "shards", "variant", "again", "pushed config", "earlier", "earliest")


def cases(count: int, seed: int) -> Iterator[str]:
    """Seeds."""
    return (str(seed * 1_000_000 + number) for number in range(count))


def prepare(shared: Path) -> None:
    """Import what cases use, and build a model of each host."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}  # a fork has no threads of its parent
    torch.set_num_threads(1)
    import transformers

    transformers.logging.disable_progress_bar()
    byte_tokenizer()
    for family in HOSTS.values():
        model = family.build()
        for auto in _fitting(model.config).values():
            assert auto is not None
    transformers.pipeline  # noqa: B018  (imports it)


def _fitting(config: Any) -> dict[str, type]:
    """Class of a host for each Auto class that has one."""
    import transformers

    found = {}
    for name in AUTO:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            kinds = mapping[type(config)]
            found[name] = kinds[0] if isinstance(kinds, tuple | list) else kinds
    return found


def attempt(case: str, folder: Path) -> None:
    """Save a model with a memory, and load it with this package, or without it."""
    random = Random(case)
    torch.manual_seed(int(case))
    family = HOSTS[random.choice(sorted(HOSTS))]
    model, record = _with_memory(family, random, folder / "plain")
    form = random.choice(FORMS)
    hub = _save(model, folder, form, random)
    if not form.startswith("earli") and random.random() < 0.25:
        _refused(model, folder / "saved", random, hub)
        return
    ways = _ways(model, random)
    way = random.choice(sorted(ways))
    options = {name: random.choice(values) for name, values in OPTIONS.items() if random.random() < 0.2}
    print(family, type(model).__name__, record, form, way, options, flush=True)
    told = f"{family} ({type(model).__name__}, {record['memory']['name']}) {form}, {way}({options}): "
    (expected, reports), error = _tried(partial(ways[way], folder / "plain", **options))
    if error is None:  # another head may take no memory
        _, error = _tried(partial(add_memory, expected, **record))
    (loaded, found), own_error = _tried(partial(ways[way], folder / "saved", **options, **hub))
    if error is not None or own_error is not None:
        if error is None or not isinstance(own_error, type(error) | ValueError):
            raise Failure(f"{told}expected {error!r}, found {own_error!r}") from own_error
        return
    stored = {spelling: t for name, t in model.state_dict().items() for spelling in _spellings(expected, name)}
    own = {name: stored[name] for name in expected.state_dict() if "memory." in name}
    expected.load_state_dict(own, strict=False)
    if problem := _differs(loaded, expected.eval(), found, reports):
        raise Failure(told + problem)
    outputs, errors = zip(*(_tried(partial(_outputs, model, family)) for model in (expected, loaded)), strict=True)
    if errors[0] is None and (errors[1] or any(map(_far, *(tensors for tensors, _ in outputs)))):
        raise Failure(f"{told}other outputs {errors[1] or ''}")


def _with_memory(family: families.Family, random: Random, plain: Path) -> tuple[Any, dict[str, Any]]:
    """A model with weights and a memory of a random kind, saved without the memory in `plain`; and its record."""
    config = family.build().config
    fitting = _fitting(config)
    kinds = [fitting[name] for name in sorted(fitting) if family.carrying or name != "AutoModelForCausalLM"]
    memories = [*STREAMS.values(), *KINDS.values(), *RECENT.values()] if family.carrying else []
    memories += [] if family in families.DECODERS else [*SHARED.values()] * 9
    for _ in range(100):
        model = random.choice(kinds)(config).eval()
        model.save_pretrained(plain)
        memory = random.choice(memories)
        try:
            awaken(add_memory(model, memory, **(family.options if memory in SHARED.values() else family.carrying)))
        except ValueError:  # this class does not take it
            continue
        return model, json.loads(json.dumps(model.config.cached_transformers))
    raise Failure(f"{family} takes none of the memories")


def _save(model: Any, folder: Path, form: str, random: Random) -> dict[str, Any]:
    """Save in one of the forms; return the options that loading needs."""
    place = folder / "saved" / "inner" if form == "subfolder" else folder / "saved"
    hub = {"subfolder": {"subfolder": "inner"}, "variant": {"variant": "fp16"}}.get(form, {})
    sharded = {"max_shard_size": "20KB"} if form == "shards" or random.random() < 0.2 else {}
    model.save_pretrained(place, **sharded, **({"variant": "fp16"} if form == "variant" else {}))
    config = place / "config.json"
    written = json.loads(config.read_text())
    if form == "again":
        type(model).from_pretrained(place).save_pretrained(place)
    elif form == "pushed config":
        type(model.config).from_pretrained(place).save_pretrained(place)
    elif form == "earlier":
        config.write_text(json.dumps({key: value for key, value in written.items() if key != "id2label"}))
    elif form == "earliest":
        config.write_text(json.dumps({"model_type": written["host_type"], **written["host"]}))
    return hub


def _ways(model: Any, random: Random) -> dict[str, Callable[..., Any]]:
    """Calls that take a folder and options, and load the model, or the model with another head."""
    import transformers

    fitting = _fitting(model.config)
    auto = random.choice(sorted(fitting))
    kind, other, same = getattr(transformers, auto), fitting[auto], type(model).from_pretrained
    reference = type(model.config).from_dict({**model.config.to_dict(), "cached_transformers": None})
    vars(reference).pop("cached_transformers")

    def first(folder: Path, **options: Any) -> Any:
        hub = {key: options[key] for key in ("subfolder",) if key in options}
        given = {key: options.pop(key) for key in ("output_hidden_states", "use_cache") if key in options}
        config = transformers.AutoConfig.from_pretrained(folder, **given, **hub)
        return kind.from_pretrained(folder, config=config, **options)

    def pipeline(folder: Path, **options: Any) -> Any:
        told = options.pop("output_loading_info", False)
        task = WRITES[auto.removeprefix("AutoModelFor")]
        made = transformers.pipeline(task, str(folder), tokenizer=byte_tokenizer(), model_kwargs=options).model
        return (made, {}) if told else made

    def ours(folder: Path, **options: Any) -> Any:
        return load_pretrained(str(folder), **options) if folder.name == "saved" else same(folder, **options)

    ways: dict[str, Callable[..., Any]] = {
        "concrete class": same,
        "other class": other.from_pretrained,
        "Auto class": kind.from_pretrained,
        "config first": first,
        "own config": partial(kind.from_pretrained, config=reference),
        "own config, concrete class": partial(same, config=reference),
        "load_pretrained": ours,
    }
    if auto.removeprefix("AutoModelFor") in WRITES:
        ways["pipeline"] = pipeline
    return ways


def _tried(load: Callable[[], Any]) -> tuple[tuple[Any, dict[str, Any]], Exception | None]:
    """Result of a call, and what it reports; or its error."""
    torch.manual_seed(7)  # of heads that are not stored
    try:
        made = load()
    except Exception as error:
        return (None, {}), error
    return (made if isinstance(made, tuple) else (made, {})), None


def _spellings(model: Any, name: str) -> tuple[str, ...]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _differs(loaded: Any, expected: Any, found: Any, reports: Any) -> str | None:
    """Describe the first difference."""
    if type(loaded) is not type(expected) or loaded.training:
        return f"expected a {type(expected).__name__} in evaluation mode, found a {type(loaded).__name__}"
    own, other = loaded.state_dict(), expected.state_dict()
    if own.keys() != other.keys():
        return f"names of one of the two: {sorted(own.keys() ^ other.keys())[:3]}"
    for name, t in own.items():
        if t.dtype != other[name].dtype or not torch.equal(t, other[name]):
            return f"{name} is another tensor"
    configs = [json.loads(model.config.to_json_string(use_diff=False)) for model in (loaded, expected)]
    if configs[0] | (name := {"_name_or_path": ""}) != configs[1] | name:
        wrong = sorted(key for key in configs[0] | configs[1] if configs[0].get(key) != configs[1].get(key))
        return f"another config: {[(key, configs[0].get(key), configs[1].get(key)) for key in wrong]}"
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if set(found.get(key, ())) != set(reports.get(key, ())):
            return f"{key}: expected {reports.get(key)}, found {found.get(key)}"
    return None


@torch.no_grad()
def _outputs(model: Any, family: families.Family) -> list[Tensor]:
    given = {key: t.to(model.dtype) if t.is_floating_point() else t for key, t in family.given().items()}
    return [t for t in _pytree.tree_leaves(dict(model(**given))) if isinstance(t, Tensor)]


def _far(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not torch.allclose(a.float(), b.float(), atol=1e-6, equal_nan=True)


def _refused(model: Any, folder: Path, random: Random, hub: dict[str, Any]) -> None:
    """Without this package all classes refuse the folder, and name the package."""
    import transformers

    _take_patches_off()
    kinds = [type(model), type(model.config), transformers.AutoConfig]
    kinds += [getattr(transformers, auto) for auto in _fitting(model.config)]
    kinds += list(itertools.chain(*(_fitting(family.build().config).values() for family in HOSTS.values())))
    kind = random.choice([type(model), random.choice(kinds)])
    made, error = _tried(partial(kind.from_pretrained, folder, **hub))
    if error is None or "cached_transformers" not in str(error):
        raise Failure(f"without the package, {kind.__name__}: expected an error that names it, found {error or made}")


def _take_patches_off() -> None:
    """Give transformers its own functions again in this process: the package changes nothing else of it."""
    from transformers import configuration_utils, modeling_utils

    for kind in (configuration_utils.PretrainedConfig, modeling_utils.PreTrainedModel):
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", value)
            if getattr(function, "__globals__", {}).get("__name__", "").startswith("cached_transformers"):
                own = function.__wrapped__
                setattr(kind, name, classmethod(own) if isinstance(value, classmethod) else own)


DRILL = Drill(
    "loading",
    "a saved host with a memory, loaded by a random class, Auto class or pipeline, from a random layout with random "
    "options: the host's own config and weights as plain transformers loads them, with the memory; without this "
    "package an error that names it",
    cases,
    attempt,
    count=500,
    sample=10,
    prepare=prepare,
)
