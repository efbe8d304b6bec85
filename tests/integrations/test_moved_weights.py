"""Hosts with a memory whose weights accelerate offloads, FSDP cuts up, and torch.compile reads through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from common import TORCH
from integrations import transformers_hosts as T
from integrations.families import ALL
from integrations.hosts import library
from integrations.transformers_hosts import Architecture, architectures, awaken, stream, words
from integrations.wrapped_checks import one_process
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from cached_transformers.integrations.transformers.segmented_forward import DecoderForward
from cached_transformers.state import named_tensors

some = pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])


@architectures(T.DECODERS)
@some
@torch.no_grad()
def test_offloaded_to_the_cpu_it_computes_the_same(host: Architecture, memory: str) -> None:
    accelerate = library("accelerate")
    model, ids = awaken(stream(host, memory)), words(2, 3 * T.SEGMENT)
    expected, text = model(ids), model.generate(ids[:, :7], max_new_tokens=6, do_sample=False)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    found = model(ids)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(model.generate(ids[:, :7], max_new_tokens=6, do_sample=False), text)
    assert all(p.is_meta for p in model.parameters())  # and are sent away again
    fresh = model.init_memory_state(2)
    assert all(t.device.type == "cpu" for _, t in named_tensors(fresh))
    torch.testing.assert_close(model(ids, memory_state=fresh).logits, expected.logits)


@torch.no_grad()
def test_dispatched_to_disk_it_computes_the_same(tmp_path: Path) -> None:
    accelerate = library("accelerate")
    model, ids = awaken(stream(T.GPT2, "rmt")), words(2, 3 * T.SEGMENT)
    expected = model(ids).logits
    places = {name: "cpu" for name, _ in model.transformer.named_children()} | {"memory": "disk"}
    places = {f"transformer.{name}": place for name, place in places.items()} | {"lm_head": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert model.transformer.memory.initial_MD.is_meta
    torch.testing.assert_close(model(ids).logits, expected)


def test_an_offloaded_encoder_keeps_its_shared_memory() -> None:
    accelerate, (model, _, (x,)) = library("accelerate"), made("timm_vit", "grc")
    model.train()(x).sum().backward()
    with torch.no_grad():
        expected = model.eval()(x)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(model(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["grc_stream", "rmt"])
def test_compiled_there_is_one_graph_for_all_segments(memory: str) -> None:
    model, counter = awaken(stream(T.GPT2, memory)), CompileCounter()
    compiled, operations = torch.compile(model, backend=counter), []
    for segments in (3, 6, 12):
        ids = words(2, segments * T.SEGMENT + 2)
        found, expected = (m(ids, use_cache=False).logits for m in (compiled, model))
        torch.testing.assert_close(found, expected)
        operations.append(counter.op_count)
    assert operations[2] - operations[1] < operations[0] / 10  # of the joining alone


@pytest.mark.skipif(TORCH < (2, 9), reason="older versions of torch have another mark")
def test_torch_compile_does_not_trace_into_what_reads_segments() -> None:
    stream(T.GPT2, "rmt")
    assert DecoderForward._read_apart._torchdynamo_disable_recursive is False


Batch = tuple[Tensor, ...]


def made(name: str, memory: str) -> tuple[nn.Module, list[nn.Module], Batch]:
    """A model in training, its blocks and a batch of four rows."""
    family = next(family for family in ALL if family.name == name)
    model = family.with_memory(T.STREAMS.get(memory, {"name": memory})).train()
    if name == "gpt2":
        return awaken(model), list(model.transformer.h), (words(4, 3 * T.SEGMENT),)
    return model, list(model.blocks), (torch.randn(4, 3, 32, 32),)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs = batch[0]
    return model(inputs).square().mean() if inputs.is_floating_point() else model(inputs, labels=inputs).loss


def two_steps(models: list[nn.Module], shares: list[Batch]) -> dict[str, Tensor]:
    """The loss and all gradients of two steps, as the mean over models and their rows; who has a shared memory has that
    of the first model from step to step, as DDP would have it."""
    found: dict[str, Tensor] = {}
    for step in range(2):
        for model, share in zip(models, shares, strict=True):
            for shared, first in zip(model.buffers(), models[0].buffers(), strict=True):
                shared.copy_(first)
            model.zero_grad()
            loss = loss_of(model, share)
            loss.backward()
            gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            for name, value in {"loss": loss.detach(), **gradients}.items():
                found[f"{name} {step}"] = found.get(f"{name} {step}", 0) + value / len(models)
        for model in models:
            model.eval().train()  # a shared memory moves on
    return found


def _whole(t: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return t.full_tensor().detach() if isinstance(t, DTensor) else t.detach().clone()


def cut_up(name: str, memory: str, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """`two_steps` of a model that FSDP2 cuts up by blocks, on this process' rows of the batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, blocks, batch = made(name, memory)
    for part in (*blocks, model):
        fully_shard(part)
    found = two_steps([model], [tuple(t.chunk(world)[rank] for t in batch)])
    if hasattr(model, "init_memory_state"):
        assert not any(isinstance(t, DTensor) for _, t in named_tensors(model.init_memory_state(2)))
    return found


def in_one_piece(name: str, memory: str, world: int = 1) -> dict[str, Tensor]:
    """`two_steps` of whole models, one for each share of the rows."""
    models, batch = [made(name, memory)[0] for _ in range(world)], made(name, memory)[2]
    return two_steps(models, [tuple(t.chunk(world)[rank] for t in batch) for rank in range(world)])


def work(rank: int, world: int, name: str, memory: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    try:
        torch.save(cut_up(name, memory, rank, world), Path(folder) / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


CASES = [("gpt2", "rmt"), ("gpt2", "grc_stream"), ("timm_vit", "grc")]


@pytest.mark.slow
@pytest.mark.parametrize("name, memory", CASES)
def test_cut_up_among_two_processes_it_learns_as_one(name: str, memory: str, tmp_path: Path) -> None:
    world = 2
    torch.multiprocessing.spawn(work, (world, name, memory, str(tmp_path)), world)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    expected = in_one_piece(name, memory, world)
    assert parts[0].keys() == expected.keys()
    if name == "gpt2":  # whose rows know nothing of each other
        whole = in_one_piece(name, memory)
        torch.testing.assert_close(expected, whole, rtol=1e-5, atol=1e-6)
    for key, value in expected.items():
        found = sum(part[key] for part in parts) / world if key.startswith("loss") else parts[0][key]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, memory", CASES)
def test_cut_up_for_one_process_it_learns_as_before(name: str, memory: str) -> None:
    with one_process():
        found = cut_up(name, memory)
    for key, value in in_one_piece(name, memory).items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
