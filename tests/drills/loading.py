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
from integrations.hosts import library
from integrations.transformers_hosts import awaken, byte_tokenizer
from torch import Tensor
from torch.utils import _pytree

from cached_transformers import add_memory, load_pretrained

from .frame import Failure, bound_memory

NAMES = ("gpt2", "llama", "qwen2", "mistral", "gemma3_text", "bert", "distilbert", "roberta", "t5", "bart", "vit")
HOSTS = {family.name: family for family in families.ALL if family.name in (*NAMES, "clipvision", "switchtransformers")}
HEADS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "Seq2SeqLM", "ImageClassification")
AUTO = ("AutoModel", *(f"AutoModelFor{head}" for head in HEADS))
TASKS = {"AutoModelForCausalLM": "text-generation", "AutoModelForMaskedLM": "fill-mask"}
OPTIONS: dict[str, tuple[Any, ...]] = {
    **{"attn_implementation": ("eager", "sdpa"), "dtype": (torch.bfloat16, torch.float32, "auto")},
    **{"device_map": ("cpu", "auto"), "low_cpu_mem_usage": (True,), "output_loading_info": (True,)},
    **{"num_labels": (2, 3), "output_hidden_states": (True,), "layer_norm_eps": (1e-3,), "rms_norm_eps": (1e-3,)},
    **{"use_cache": (False, True), "attention_dropout": (0.25,), "tie_word_embeddings": (False, True)},
}
FORMS = ("folder", "subfolder", "shards", "variant", "again", "config again", "earlier", "earliest")
"""The last two are configs of earlier versions, which transformers does not refuse without this package."""
ROOM = 1 << 31
"""Bytes of a model of default size, which must not be built."""


def cases(count: int, seed: int) -> Iterator[str]:
    """Seeds."""
    return (str(seed * 1_000_000 + number) for number in range(count))


def prepare(shared: Path) -> None:
    """Import the modules of all hosts."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}  # a fork has no threads of its parent
    torch.set_num_threads(1)
    library("transformers").logging.disable_progress_bar()
    for family in HOSTS.values():
        _fitting(family.build().config)
    assert byte_tokenizer() and library("transformers").pipeline


def _fitting(config: Any) -> dict[str, Any]:
    """Class of a host for each Auto class that has one."""
    mappings = {name: getattr(library("transformers"), name)._model_mapping for name in AUTO}
    found = {name: mapping[type(config)] for name, mapping in mappings.items() if type(config) in mapping}
    return {name: kind[0] if isinstance(kind, tuple | list) else kind for name, kind in found.items()}


def attempt(case: str, folder: Path) -> None:
    """Save a model with a memory, and load it with this package, or without it."""
    random = Random(case)
    torch.manual_seed(int(case))
    family, form = HOSTS[random.choice(sorted(HOSTS))], random.choice(FORMS)
    model = _with_memory(family, random, folder / "plain")
    record = json.loads(json.dumps(model.config.cached_transformers))
    hub = _save(model, folder / "saved", form)
    if not form.startswith("earli") and random.random() < 0.25:
        _refused(model, folder / "saved", random, hub)
        return
    way, load = random.choice(sorted(_ways(model, random).items()))
    options = {name: random.choice(values) for name, values in OPTIONS.items() if random.random() < 0.25}
    for name in options.keys() - list(OPTIONS)[:5]:
        if "own" in way or not hasattr(model.config, name):
            del options[name]
    told = f"{type(model).__name__} with {record} ({form}), {way}({options}): "
    (expected, reports), error = _tried(partial(load, folder / "plain", **options))
    if error is None:  # another head may take no memory
        _, error = _tried(partial(add_memory, expected, **record))
    (loaded, found), own_error = _tried(partial(load, folder / "saved", **options, **hub))
    if way == "pipeline" and error is not None and type(loaded) is type(model):  # it tries the folder's class, too
        if other := loaded.state_dict().keys() ^ model.state_dict().keys():
            raise Failure(f"{told}names of one of the two: {sorted(other)[:3]}")
        return
    if error is not None or own_error is not None:
        if error is None or not isinstance(own_error, type(error) | ValueError):
            raise Failure(f"{told}expected {error!r}, found {own_error!r}") from own_error
        return
    stored = {spelling: t for name, t in model.state_dict().items() for spelling in _spellings(expected, name)}
    expected.load_state_dict({name: stored[name] for name in expected.state_dict() if "memory." in name}, strict=False)
    if problem := _difference(loaded, expected.eval()):
        raise Failure(told + problem)
    for key in reports.keys() & {"missing_keys", "unexpected_keys", "mismatched_keys"}:
        if set(found[key]) != set(reports[key]):
            raise Failure(f"{told}{key}: expected {reports[key]}, found {found[key]}")
    outputs, errors = zip(*(_tried(partial(_outputs, model, family)) for model in (expected, loaded)), strict=True)
    if errors[0] is None and (errors[1] or any(map(_far, *(tensors for tensors, _ in outputs)))):
        raise Failure(f"{told}other outputs {errors[1] or ''}")


def _with_memory(family: families.Family, random: Random, plain: Path) -> Any:
    """A model with a memory of a random kind and what a batch leaves in it, saved without it in `plain`."""
    fitting = _fitting(config := family.build().config)
    kinds = [fitting[name] for name in sorted(fitting) if family.carrying or name != "AutoModelForCausalLM"]
    memories = [*STREAMS.values(), *KINDS.values(), *RECENT.values()] if family.carrying else []
    memories += [] if family in families.DECODERS else [*SHARED.values()] * 9
    for _ in range(100):
        model = random.choice(kinds)(config)
        model.save_pretrained(plain)
        memory = random.choice(memories)
        given = family.options if memory in SHARED.values() else family.carrying
        _, refused = _tried(partial(add_memory, model, memory, **given))
        if refused is None:
            _tried(partial(awaken(model).train(), **family.given()))  # some heads need labels
            return model.eval()
    raise Failure(f"{family} takes none of the memories")


def _save(model: Any, folder: Path, form: str) -> dict[str, Any]:
    """Save in one of the forms; return the options that loading needs."""
    hub = {"subfolder": {"subfolder": "inner"}, "variant": {"variant": "fp16"}}.get(form, {})
    folder = folder / hub.get("subfolder", "")
    sharded = {"max_shard_size": "20KB"} if form == "shards" else {}
    model.save_pretrained(folder, **sharded, **({} if form == "subfolder" else hub))
    config = folder / "config.json"
    written = json.loads(config.read_text())
    if form == "again":
        type(model).from_pretrained(folder).save_pretrained(folder)
    elif form == "config again":
        type(model.config).from_pretrained(folder).save_pretrained(folder)
    elif form == "earlier":
        config.write_text(json.dumps({key: value for key, value in written.items() if key != "id2label"}))
    elif form == "earliest":
        config.write_text(json.dumps({"model_type": written["host_type"], **written["host"]}))
    return hub


def _ways(model: Any, random: Random) -> dict[str, Callable[..., Any]]:
    """Calls that take a folder and options, and load the model, or the model with another head."""
    transformers, fitting = library("transformers"), _fitting(model.config)
    auto = random.choice(sorted(fitting))
    kind, same = getattr(transformers, auto).from_pretrained, type(model).from_pretrained
    config = {key: value for key, value in model.config.to_dict().items() if key != "cached_transformers"}
    own = {"config": type(model.config).from_dict(config)}

    def first(folder: Path, **options: Any) -> Any:
        given = {key: options.pop(key) for key in options.keys() & list(OPTIONS)[5:]}
        given |= {key: options[key] for key in ("subfolder",) if key in options}
        return kind(folder, config=transformers.AutoConfig.from_pretrained(folder, **given), **options)

    def pipeline(folder: Path, output_loading_info: Any = None, **options: Any) -> Any:
        (tokenizer := byte_tokenizer()).mask_token = "<end>"
        try:
            return transformers.pipeline(TASKS[auto], folder, tokenizer=tokenizer, model_kwargs=options).model
        except AttributeError:  # of a pipeline around another class, where the task's own refuses
            return kind(folder, **options)

    def ours(folder: Path, **options: Any) -> Any:
        return load_pretrained(str(folder), **options) if folder.name == "saved" else same(folder, **options)

    return {
        **{"its class": same, "its class, own config": partial(same, **own), "load_pretrained": ours},
        **{auto: kind, f"{auto}, own config": partial(kind, **own), f"{auto}, config first": first},
        **{fitting[auto].__name__: fitting[auto].from_pretrained, **({"pipeline": pipeline} if auto in TASKS else {})},
    }


def _tried(load: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The model and its report, or another result; or the error."""
    torch.manual_seed(7)  # of heads that are not stored
    try:
        made = load()
    except Exception as error:
        return (None, {}), error
    return (made if isinstance(made, tuple) else (made, {})), None


def _spellings(model: Any, name: str) -> tuple[str, ...]:
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _difference(loaded: Any, expected: Any) -> str | None:
    """Describe the first difference of two models."""
    if type(loaded) is not type(expected) or loaded.training:
        return f"expected a {type(expected).__name__} in evaluation mode, found a {type(loaded).__name__}"
    own, other = loaded.state_dict(), expected.state_dict()
    if own.keys() != other.keys():
        return f"names of one of the two: {sorted(own.keys() ^ other.keys())[:3]}"
    if wrong := [key for key, t in own.items() if t.dtype != other[key].dtype or not torch.equal(t, other[key])]:
        return f"other tensors: {wrong[:3]}"
    a, b = (json.loads(model.config.to_json_string(use_diff=False)) for model in (loaded, expected))
    wrong = sorted(key for key in a | b if key != "_name_or_path" and a.get(key) != b.get(key))
    return f"another config: {[(key, a.get(key), b.get(key)) for key in wrong]}" if wrong else None


@torch.no_grad()
def _outputs(model: Any, family: families.Family) -> list[Tensor]:
    given = {key: t.to(model.dtype) if t.is_floating_point() else t for key, t in family.given().items()}
    return [t for t in _pytree.tree_leaves(dict(model(**given))) if isinstance(t, Tensor)]


def _far(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not torch.allclose(a.float(), b.float(), atol=1e-6, equal_nan=True)


def _refused(model: Any, folder: Path, random: Random, hub: dict[str, Any]) -> None:
    """Without this package all classes refuse the folder, and name the package."""
    from transformers import configuration_utils, modeling_utils

    transformers = library("transformers")
    for patched in (configuration_utils.PretrainedConfig, modeling_utils.PreTrainedModel):  # all that we change
        for name, value in list(vars(patched).items()):
            function = getattr(value, "__func__", value)
            if getattr(function, "__globals__", {}).get("__name__", "").startswith("cached_transformers"):
                own = function.__wrapped__
                setattr(patched, name, classmethod(own) if isinstance(value, classmethod) else own)
    kinds = [type(model.config), transformers.AutoConfig, *(getattr(transformers, auto) for auto in AUTO)]
    kinds += itertools.chain(*(_fitting(family.build().config).values() for family in HOSTS.values()))
    kind = random.choice([type(model), random.choice(kinds)])
    bound_memory(ROOM)
    _, error = _tried(partial(kind.from_pretrained, folder, **hub))
    if "cached_transformers" not in str(error):
        raise Failure(f"without the package, {kind.__name__}: expected an error that names it, found {error!r}")


SUMMARY = (
    "a saved host with a memory, loaded by a random class, Auto class or pipeline, from a random layout with random "
    "options: the host's own config and weights as plain transformers loads them, with the memory; without this "
    "package an error that names it"
)
COUNT, SAMPLE = 450, 16
