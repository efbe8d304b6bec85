"""Memories in models with adapters of PEFT: trained, switched, saved, loaded, merged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations import hosts
from integrations import transformers_hosts as T
from integrations.hosts import library
from integrations.test_refusals import fingerprint, refuse
from packaging.version import Version
from torch import Tensor, nn

from cached_transformers import add_memory, load_pretrained, remove_memory
from cached_transformers.memories.grc.shared_cache import caches

peft, LEAST = library("peft"), library("transformers.integrations.peft").MIN_PEFT_VERSION
own_adapters = pytest.mark.skipif(Version(peft.__version__) < Version(LEAST), reason=f"transformers asks for {LEAST}")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*is deprecated:FutureWarning")

IDS = T.words(2, 13)
QKV = {T.GPT2: ["c_attn"], T.LLAMA: ["q_proj", "k_proj", "v_proj"]}
OUT = {T.GPT2: ["attn.c_proj"], T.LLAMA: ["o_proj"]}


def lora(targets: Any, save: bool = True, **more: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["memory"] if save else None, **more)


def adapted(model: nn.Module, targets: Any, save: bool = True, **more: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora(targets, save, **more)).train()


def steps(model: Any, run: Callable[[Any], Tensor], number: int = 3) -> None:
    """Steps of one size for all that has a gradient, which stays."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(number):
        model.zero_grad()
        run(model).square().mean().backward()
        with torch.no_grad():
            for p in trained:
                p -= 0.05 * (0 if p.grad is None else p.grad.sign())


def logits(model: Any) -> Tensor:
    return model(IDS).logits  # type: ignore[no-any-return]


def named(model: nn.Module, part: str) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if part in name}


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@T.architectures(T.DECODERS)
def test_two_adapters_have_memories_of_their_own(host: T.Architecture) -> None:
    model = adapted(T.stream(host, "grc_stream"), OUT[host])
    steps(model, logits)
    torch.manual_seed(6)
    model.add_adapter("second", lora(OUT[host]))
    results = {}
    for name in ("second", "default"):
        model.set_adapter(name)
        steps(model.train(), logits)
        with torch.no_grad():
            results[name] = logits(model.eval())
    assert (results["second"] - results["default"]).abs().max() > 1e-3
    with torch.no_grad():
        for name in ("second", "default", "second"):
            model.set_adapter(name)
            assert torch.equal(logits(model), results[name])
        near(logits(model.merge_and_unload()), results["second"])


def assert_merges(model: Any, run: Callable[[Any], Tensor]) -> nn.Module:
    """Adapters give the same beside their layer, in its weights, out of them again, and for good."""
    with torch.no_grad():
        beside = run(model.eval())
        model.merge_adapter()
        near(run(model), beside)
        model.unmerge_adapter()
        near(run(model), beside)
        merged: nn.Module = model.merge_and_unload()
        near(run(merged), beside)
    return merged


VIT_PARTS = {"out": ["attn.proj"], "qkv": ["qkv"], "all": r".*\.(qkv|proj|fc1|fc2|query|key_value|from_\w+|projection)"}
BERT_PARTS = {
    "out": ["attention.output.dense"],
    "qkv": [r"self.query", "self.key", "self.value"],
    "all": r".*\.(query|key|value|dense|key_value|from_\w+|projection)",
}
RELEASED = {"mix": "outputs", "source": "output", "initial_gate": 0.5}


@pytest.mark.parametrize("where", ["out", "qkv", "all"])
@pytest.mark.parametrize("mixed", [{}, RELEASED], ids=["heads", "outputs"])
@pytest.mark.parametrize("save", [True, False], ids=["saved", "frozen"])
@hosts.hosts([hosts.VIT, hosts.BERT_SDPA])
def test_merged_and_unmerged_encoders_are_equal(
    host: hosts.Host, where: str, mixed: dict[str, Any], save: bool
) -> None:
    given, parts = host.given(), VIT_PARTS if host is hosts.VIT else BERT_PARTS
    model = host.with_memory(**mixed)
    if not save:
        model.load_state_dict(model.state_dict())  # as one that is trained already
    model = adapted(model, parts[where], save)

    def run(model: Any) -> Tensor:
        return host.run(model, given)

    steps(model, run)
    for name, p in named(model, "lora_").items():
        assert p.grad is not None and p.grad.any(), name
    merged = assert_merges(model, run)
    for cache in caches(merged):
        cache.cache_MC += 1
    with torch.no_grad():
        assert (run(merged) - run(model)).abs().max() == 0  # the memory is the host's, and no adapter's copy
        for cache in caches(merged):
            cache.reset_cache()
        changed = run(merged)
        assert (changed - run(host.build().eval())).abs().max() > 1e-4


def test_a_folded_cache_is_none_of_an_adapter_s() -> None:
    """In evaluation keys and values of a constant cache are kept, but not while an adapter may be switched off."""
    host, given = hosts.VIT, hosts.VIT.given()
    model = host.with_memory()
    hosts.train(host, model)
    plain = host.run(model.eval(), given).detach()
    model = adapted(model, ["key_value"], save=False).eval()
    for p in named(model, "lora_B").values():
        nn.init.normal_(p)
    with torch.no_grad():
        with_adapter = host.run(model, given)
        assert (with_adapter - plain).abs().max() > 1e-3
        with model.disable_adapter():
            near(host.run(model, given), plain)
        near(host.run(model.merge_and_unload(), given), with_adapter)


@T.architectures(T.DECODERS)
@pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])
def test_a_new_memory_that_would_stay_as_drawn_is_refused(host: T.Architecture, memory: str) -> None:
    model = adapted(T.stream(host, memory), QKV[host], save=False)
    refuses(r"modules_to_save=\['memory'\]", logits, model)
    with torch.no_grad():
        logits(model)  # nothing trains here
    logits(model.eval())
    for p in named(model, "memory.").values():
        p.requires_grad_()
    logits(model.train())
    for p in named(model, "memory.").values():
        p.requires_grad_(False)
    logits(model)  # it has trained


@hosts.hosts([hosts.VIT, hosts.BERT_SDPA, hosts.ENCODER])
def test_a_new_memory_in_a_frozen_encoder_is_refused(host: hosts.Host) -> None:
    model = host.with_memory().train()
    model.requires_grad_(False)
    given = host.given()
    host.run(model, given)  # nothing at all trains
    next(p for name, p in model.named_parameters() if "memory" not in name).requires_grad_()
    for other in (model, copy.deepcopy(model)):
        refuses("memory GRC was just added", host.run, other, given)
    model.load_state_dict({name: t for name, t in model.state_dict().items() if "memory" not in name}, strict=False)
    with pytest.raises(ValueError, match="just added"):  # it was not loaded
        host.run(model, given)
    model.load_state_dict(model.state_dict())
    host.run(model, given)


@hosts.hosts([hosts.VIT, hosts.BERT_SDPA])
def test_a_layer_may_be_frozen_with_its_memory(host: hosts.Host) -> None:
    model, given = host.with_memory().train(), host.given()
    layers = [m for name, m in model.named_modules() if name.endswith(("blocks.0", "layer.0", "embeddings"))]
    assert layers
    for layer in layers:
        layer.requires_grad_(False)
    host.run(model, given).square().mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in named(model, "memory.").values())
    model = host.with_memory().train()
    for name, p in model.named_parameters():
        p.requires_grad_("memory." not in name)
    refuses(r"added to .*\.0\.att.*\.1\.att.*requires_grad", host.run, model, given)


def test_adapters_that_name_a_map_of_a_new_memory_by_chance_are_refused() -> None:
    """The usual names of BERT's projections are a memory's, too."""
    model = adapted(T.BERT.with_memory(), ["query", "value"], save=False)
    refuses(r"branch\.query\.lora_A.*branch\.key_value", logits, model)


def test_a_loaded_memory_may_be_frozen(tmp_path: Path) -> None:
    T.stream(T.GPT2, "rmt").save_pretrained(tmp_path / "whole")
    model = adapted(load_pretrained(str(tmp_path / "whole")), ["c_attn"], save=False)
    logits(model)
    saved = adapted(T.stream(T.GPT2, "rmt"), ["c_attn"])
    saved.save_pretrained(tmp_path / "adapter")
    logits(peft.PeftModel.from_pretrained(T.stream(T.GPT2, "rmt"), tmp_path / "adapter").merge_and_unload().train())


def with_own_adapter(save: bool = True) -> Any:
    model = T.stream(T.LLAMA, "rmt")
    torch.manual_seed(5)
    model.add_adapter(lora(["q_proj"], save))
    return model.train()


@own_adapters
def test_an_adapter_of_transformers_saves_the_memory(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    transformers, model = library("transformers"), with_own_adapter()
    options = {"max_steps": 2, "save_steps": 2, "learning_rate": 0.1, "report_to": [], "use_cpu": True}
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **options)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        trained = logits(model.eval())
        assert (trained - logits(T.stream(T.LLAMA, "rmt"))).abs().max() > 1e-3
        for folder in ("saved", "checkpoint-2"):
            loaded = T.stream(T.LLAMA, "rmt")
            loaded.load_adapter(str(tmp_path / folder))
            near(logits(loaded), trained)


@own_adapters
def test_a_memory_that_no_adapter_saves_is_refused(tmp_path: Path) -> None:
    model = with_own_adapter(save=False)
    refuses(r"modules_to_save=\['memory'\]", logits, model)
    for p in named(model, "memory.").values():
        p.requires_grad_()
    logits(model)
    for unsaved, way_out in ((model, "modules_to_save"), (adapted(T.stream(T.LLAMA, "rmt"), ["q_proj"]), "PeftModel")):
        host = unsaved.get_base_model() if hasattr(unsaved, "get_base_model") else unsaved
        refuses(way_out, host.save_pretrained, tmp_path / "lost")
        assert not (tmp_path / "lost").exists()


@pytest.mark.parametrize("remembers", [True, False])
def test_an_adapter_with_a_memory_is_not_loaded_without_it(remembers: bool, tmp_path: Path) -> None:
    base, folder, plain = tmp_path / "base", tmp_path / "adapter", T.LLAMA.build
    kind, auto = type(plain()), library("transformers").AutoModel
    (T.stream(T.LLAMA, "rmt") if remembers else plain()).save_pretrained(base)

    def loaded() -> Any:
        if remembers:
            return load_pretrained(str(base))
        return add_memory(kind.from_pretrained(base), T.STREAMS["rmt"], segment_length=T.SEGMENT)

    trained = adapted(loaded(), ["q_proj"])
    trained.save_pretrained(folder)
    calls: list[Callable[[], Any]] = [
        lambda: auto.from_pretrained(folder),
        lambda: kind.from_pretrained(folder),
        lambda: plain().load_adapter(str(folder)),
        lambda: peft.PeftModel.from_pretrained(plain(), folder),
        lambda: adapted(plain(), ["q_proj"], save=False).load_adapter(folder, "second"),
    ]
    for call in calls:
        refuses(r"modules_to_save=\['memory'\].*load_pretrained.*add_memory", call)
    near(logits(peft.PeftModel.from_pretrained(loaded(), folder)), logits(trained.eval()))


@own_adapters
def test_a_memory_beside_adapters_that_would_not_save_it_is_refused() -> None:
    model = adapted(T.GPT2.build(), ["c_attn"], save=False)
    way_out = r"holds adapters of PEFT \(.*c_attn is a Linear\).*give add_memory the PeftModel"
    for inner in (model.get_base_model(), model.base_model):
        refuse(inner, way_out, "rmt", length=2)
    native = T.GPT2.build()
    native.add_adapter(lora(["c_attn"], save=False))
    refuse(native, way_out, "rmt", length=2)


def test_adapters_without_modules_to_save_are_refused() -> None:
    config = peft.TrainableTokensConfig(token_indices=[3], target_modules=["wte"])
    refuse(peft.get_peft_model(T.GPT2.build(), config), "TrainableTokensConfig, which has no modules_to_save", "rmt")


@T.streams
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_a_learned_prompt_beside_a_frozen_memory_is_refused(memory: str, kind: str) -> None:
    """The prompt is outside of the model that has the memory, where nothing trains."""
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"modules_to_save=\['memory'\]|past_key_values.*prefix tuning"):
        logits(peft.get_peft_model(T.stream(T.GPT2, memory), config).train())


@hosts.hosts([hosts.VIT, hosts.BERT_SDPA, hosts.ENCODER])
def test_a_memory_for_an_encoder_with_adapters(host: hosts.Host, tmp_path: Path) -> None:
    given = host.given()

    def run(model: Any) -> Tensor:
        return host.run(model, given)

    targets = {"vit": ["attn.proj"], "bert_sdpa": ["output.dense"], "encoder": ["out_proj", "linear1"]}[host.name]
    model = add_memory(adapted(host.build(), targets, save=False), "grc", **host.options)
    steps(model, run)
    for name, p in [*named(model, "memory.modules_to_save").items(), *named(model, "lora_").items()]:
        assert p.grad is not None and p.grad.any(), name
    with torch.no_grad():
        trained = run(model.eval())
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(host.with_memory(), tmp_path)
        assert torch.equal(run(loaded.eval()), trained)
    assert_merges(loaded, run)


def test_every_adapter_gets_the_memory_and_gives_it_back() -> None:
    model = adapted(T.GPT2.build(), ["c_attn"], save=False)
    model.add_adapter("second", lora(["c_attn"], save=False))
    with torch.no_grad():
        plain = logits(model.eval())
    before = fingerprint(model)
    add_memory(model, "grc_stream", length=4, segment_length=5)
    for name in ("default", "second"):
        model.set_adapter(name)
        T.awaken(model, seed=len(name))
        trained = {n for n, p in model.named_parameters() if p.requires_grad and "memory" in n}
        assert trained and all(f"modules_to_save.{name}." in n for n in trained)
        assert model.peft_config[name].modules_to_save == ["memory"]
    with torch.no_grad():
        results = []
        for name in ("default", "second"):
            model.set_adapter(name)
            results.append(logits(model))
        assert (results[0] - results[1]).abs().max() > 1e-4
        assert (results[0] - plain).abs().max() > 1e-4
        model.set_adapter("default")
        assert remove_memory(model) is model
        assert torch.equal(logits(model), plain)
    assert fingerprint(model) == before
    assert all(config.modules_to_save is None for config in model.peft_config.values())
    base = model.get_base_model()
    assert not {"save_pretrained", "push_to_hub"} & vars(base).keys() and not hasattr(
        base.config, "cached_transformers"
    )


def test_a_refused_memory_leaves_a_model_with_adapters_as_it_was() -> None:
    model = adapted(T.BERT.build(), ["query"], save=False)
    refuse(model, "memory .memformer. needs slots .* BertForMaskedLM does not give", "memformer", length=2)
    assert model.peft_config["default"].modules_to_save is None


def test_rows_with_adapters_of_their_own() -> None:
    model = adapted(T.stream(T.GPT2, "rmt"), QKV[T.GPT2] + OUT[T.GPT2])
    with torch.no_grad(), pytest.raises(ValueError, match="adapter_names"):
        model.eval()(IDS, adapter_names=["default", "__base__"])
    model = T.stream(T.GPT2, "memorizing")
    model.load_state_dict(model.state_dict())
    model = adapted(model, QKV[T.GPT2] + OUT[T.GPT2], save=False)
    steps(model, logits)
    with torch.no_grad():
        both = model.eval()(IDS, adapter_names=["default", "__base__"]).logits
        near(both[:1], model(IDS[:1]).logits)
        with model.disable_adapter():
            near(both[1:], model(IDS[1:]).logits)


def test_a_norm_of_a_memory_takes_no_adapter() -> None:
    """LN tuning by the name `norm` adapts a memory's own norm, unless the memory is saved as a whole."""
    for memory in ("rmt", "grc_stream"):
        model = T.awaken(add_memory(T.LLAMA.build(), memory, segment_length=5))
        model.load_state_dict(model.state_dict())
        tuned = peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["norm"]))
        if memory == "rmt":
            assert torch.isfinite(tuned(IDS).logits).all()
            continue
        refuses(r"gates\.norm.*modules_to_save", tuned, IDS)
