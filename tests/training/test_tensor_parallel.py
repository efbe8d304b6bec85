"""Half of the heads on each of two processes: the same losses, gradients and weights as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from tensor_parallel_worker import ALL, PLAIN, build, gradients, plain, trained
from torch import Tensor, nn

from cached_lab.training.tensor_parallel import tensor_parallel
from cached_transformers import create_model

HOLDS = {
    *("none", "transformer_xl", "streaming_llm", "segatron", "ernie_doc", "memory_transformer", "rmt", "memformer"),
    *("armt", "titans", "read_twice", "example_window", "example_tokens", "example_slots"),
}
"""Memories of which some form is taken; every form that is taken is compared."""


class Mesh:
    """So many processes, for what is refused before they are asked."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    launch.python(Path(__file__).with_name("tensor_parallel_worker.py"), folder, processes=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_is_that_of_one_process(name: str, seen: list[dict[str, Any]]) -> None:
    alone = gradients(plain(name), **PLAIN[name])
    for rank in range(2):
        close(seen[rank][name], alone)


def test_every_memory_is_that_of_one_process_or_refused_with_a_reason(seen: list[dict[str, Any]]) -> None:
    taken = [case for case in ALL if not isinstance(seen[0][str(case)], str)]
    assert {case.name for case in taken} == HOLDS
    for case in taken:
        alone = gradients(case)
        for rank in range(2):
            close(seen[rank][str(case)], alone)
    for case in ALL:
        if case not in taken:
            said = seen[0][str(case)]
            assert said == seen[1][str(case)] and "take data-parallel training (training.parallel=ddp or fsdp)" in said


def test_training_goes_as_in_one_process_and_gives_its_weights_back(seen: list[dict[str, Any]]) -> None:
    case = plain("decoder")
    alone, before = trained(case), build(case)
    for rank in range(2):
        close(seen[rank]["trained"], alone)
        for name, weight in before.state_dict().items():
            assert torch.equal(seen[rank]["whole"][name], weight), name
    assert seen[0]["numbers"] < 0.65 * sum(p.numel() for p in before.parameters())


SMALL = {"width": 16, "depth": 1, "heads": 4, "feed_forward": 32, "vocabulary": 11, "positions": "rotary"}


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({}, 3, "heads=4 must be a multiple of the 3 processes"),
        ({"feed_forward": 30}, 4, "feed_forward=30 must be a multiple of the 4 processes"),
        ({"memory": "grc_stream"}, 2, "memory StreamGRC needs 'head'"),
        ({"memory": "compressive"}, 2, "memory Compressive needs 'own_loss'"),
        ({"positions": "relative"}, 2, "position scheme RelativePositions has weights, draws or patterns of its own"),
        ({"attention": {"name": "linear"}}, 2, "attention .* has weights, draws or patterns of its own"),
        ({"experts": {"experts": 2, "every": 1}}, 2, "feed-forward .* has weights"),
        ({"memory": "feedback"}, 2, "memory Feedback needs 'context_alone'"),
    ],
)
def test_what_works_on_all_heads_is_refused(options: dict[str, Any], size: int, said: str) -> None:
    model = create_model("language_model", **{**SMALL, **options})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        tensor_parallel(model, Mesh(size))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_a_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has none; take FSDP"):
        tensor_parallel(nn.Linear(2, 2), Mesh(2))
