"""Peers of memories that cannot be measured are left out by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cached_lab.experiments.benchmarks import memories
from cached_lab.experiments.benchmarks.peers import PEERS, Peer, Sizes

TINY = Sizes(vocabulary=16, width=8, depth=1, heads=1, segment=4, segments=2, rows=1, memory=4, tokens=2)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("memformer", "memformer is not installed"),
        ("einops_exts", "einops_exts, which memformer needs, is not installed"),
    ],
)
def test_a_peer_that_is_not_there_whole_is_left_out_by_name(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(sizes: Sizes) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(PEERS, "memformer", PEERS["memformer"]._replace(build=build))
    row = memories.measure("memformer", TINY, 1)
    assert row.peer is None and row.peer_name == said
    assert memories.as_markdown([row]).splitlines()[-1].endswith(f"| {said} |")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_reaches_ours_and_the_peer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

        def forward(self, inputs_BN: torch.Tensor, memory: Any) -> Any:
            logits = self.head(self.embedding(inputs_BN))
            seen.append(logits.dtype)
            return logits, memory

    def build(sizes: Sizes) -> Peer:
        module = Theirs()
        return Peer(module, module)

    monkeypatch.setitem(PEERS, "rmt", PEERS["rmt"]._replace(build=build))
    before = memories.build
    monkeypatch.setattr(memories, "build", lambda spec, sizes: watched(before(spec, sizes), seen))
    assert memories.measure("rmt", TINY, 1, "cpu", dtype).peer is not None
    # Kept activations are counted in float32, as they are compared with those of other tables.
    assert {*seen[: -TINY.segments]} == {dtype} and len(seen) > 10


def watched(model: torch.nn.Module, seen: list[torch.dtype]) -> torch.nn.Module:
    head: Any = model.head
    head.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    return model
