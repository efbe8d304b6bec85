"""What a family has to do with a memory when others wrap the model: adapters of PEFT, DDP, FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from integrations.families import Family, words
from integrations.family_checks import BY_ROW, by_row, equal
from integrations.hosts import library
from integrations.transformers_hosts import awaken
from torch import Tensor, distributed, nn

FRAMES = "one backward for several calls"
"""What neither DDP nor FSDP2 takes: they learn from the output of a call that its backward comes."""


class Wrapped:
    """A wrapper, called in the place of the model inside, which is asked for whatever else there is."""

    def __init__(self, outside: nn.Module, inside: nn.Module) -> None:
        self.outside, self.inside = outside, inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.outside(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


def answer(family: Family, memory: dict[str, Any], model: Any) -> Tensor:
    """What the model says, of a memory with a state behind that."""
    if family.kind == "decoders":
        return model(input_ids=words()).logits
    torch.manual_seed(5)
    return by_row(family, model) if memory["name"] in BY_ROW else family.output(model(**family.given()))


def step(family: Family, memory: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Gradients of the second of two training steps, which finds what the first has left in a shared memory."""
    inside = getattr(model, "inside", model)
    inside.train()
    for _ in range(2):
        inside.zero_grad()
        answer(family, memory, model).float().square().mean().backward()
    whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in _trained(inside)}
    return {name: grad.clone() for name, grad in whole.items()}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.grad is not None]


def same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found and found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-6
        equal(found[name] / scale, gradient / scale, 1e-4)


def _refuse_frames(family: Family, memory: dict[str, Any]) -> None:
    if family.kind not in ("decoders", "encoders of texts") and memory["name"] in BY_ROW:
        raise ValueError(f"{FRAMES}: each frame is one, and only the last one's output is in the loss")


@contextmanager
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _called(family: Family, memory: dict[str, Any], model: Any) -> list[str]:
    """The host's linear layers that are called as modules (BEiT takes the weights out of some) and give a tensor (some
    routers do not), but for the head."""
    called: list[str] = []
    head = getattr(model, "get_output_embeddings", lambda: None)()
    hooks = [
        module.register_forward_hook(
            lambda _, __, out, name=name: called.append(name) if isinstance(out, Tensor) else None
        )
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    ]
    with torch.no_grad():
        answer(family, memory, model)
    for hook in hooks:
        hook.remove()
    return [name for name in dict.fromkeys(called) if "memory" not in name.split(".")]


def adapts(family: Family, memory: dict[str, Any]) -> None:
    """LoRA on every linear layer of the host: the memory trains with it, and merged the model says the same."""
    peft, model = library("peft"), awaken(family.with_memory(memory))
    names = _called(family, memory, model)
    has_weights = any("memory" in name.split(".") for name, _ in model.named_parameters())
    config = peft.LoraConfig(
        r=2, target_modules=names, modules_to_save=["memory"] if has_weights else None, init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Conv1D and its layout, and of heads that are tied
        adapted = peft.get_peft_model(model, config)
    found = step(family, memory, Wrapped(adapted, adapted))
    ours = [name for name, p in adapted.named_parameters() if p.requires_grad and ".memory." in name]
    assert bool(ours) == has_weights and not [name for name in ours if not found[name].any()]
    assert any("lora_A" in name for name in found)
    adapted.eval()
    with torch.no_grad():
        expected = answer(family, memory, Wrapped(adapted, adapted.get_base_model()))
        merged = adapted.merge_and_unload()
        equal(answer(family, memory, merged), expected, 1e-4)


def replicated(family: Family, memory: dict[str, Any]) -> None:
    """DDP: the gradients are those of the model alone."""
    _refuse_frames(family, memory)
    expected = step(family, memory, awaken(family.with_memory(memory)))
    model = awaken(family.with_memory(memory))
    with one_process():
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        found = step(family, memory, Wrapped(wrapped, model))
    assert not any(found.pop(name).any() for name in found.keys() - expected.keys())  # of what takes no part
    same_gradients(found, expected)


def cut_up(family: Family, memory: dict[str, Any]) -> None:
    """FSDP2 by block: the gradients are those of the model in one piece."""
    from torch.distributed.fsdp import fully_shard

    _refuse_frames(family, memory)
    expected = step(family, memory, awaken(family.with_memory(memory)))
    model = awaken(family.with_memory(memory))
    with one_process():
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        blocks = [b for m in lists for b in m if any("uninstall_memory" in vars(part) for part in b.modules())]
        for block in reversed(blocks):  # inner lists come later
            fully_shard(block)
        fully_shard(model)
        found = step(family, memory, model)
    same_gradients(found, expected)
