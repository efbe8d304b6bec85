"""What transformers 5.17 has in another shape, and names that not every supported version has.

The stand-ins here are held to the results of what stands in their place today; 5.17 itself is tried by installing it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.families import patches
from integrations.family_checks import STREAMS
from integrations.hosts import library
from integrations.transformers_hosts import LLAMA, SEGMENT, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import add_memory
from cached_transformers.integrations.transformers import load

SOURCE = Path(__file__).resolve().parents[2] / "src"
NEWER = {
    "transformers.core_model_loading": "revert_weight_conversion",
    "torch.nn.attention": "flex_attention",
    "torch.compiler": "set_stance",
}
"""By module; whoever uses them must do without."""
PROGRAM = """
import importlib, pkgutil, sys
for pair in sys.argv[1:]:
    module, name = pair.split(":")
    sys.modules[f"{module}.{name}"] = None
    vars(importlib.import_module(module)).pop(name, None)
import cached_transformers as package
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
import torch
q = torch.randn(3, 1, 2, 40, 16)
package.attentions.create_attention({"name": "longformer", "window": 4, "kernel": "auto"})(*q)
"""


@pytest.mark.slow
def test_every_module_imports_without_the_newer_names() -> None:
    library("transformers")
    command = [sys.executable, "-c", PROGRAM, *(f"{module}:{name}" for module, name in NEWER.items())]
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_weights_keep_their_names_where_transformers_converts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library("transformers")
    monkeypatch.delattr("transformers.core_model_loading.revert_weight_conversion")
    names = set(load._spellings(LLAMA.build(), "layers.0.weight"))
    assert names == {"layers.0.weight", "model.layers.0.weight"}


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_are_repeated_for_beams_by_a_static_method_too(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixin = library("transformers").GenerationMixin
    model = LLAMA.with_memory("rmt", length=2, segment_length=SEGMENT)
    ids = torch.randint(3, VOCABULARY, (2, 2 * SEGMENT + 2))
    options: dict[str, Any] = {"max_new_tokens": SEGMENT + 2, "do_sample": False, "num_beams": beams, "pad_token_id": 2}
    want = model.generate(ids, **options)
    of_today = mixin._expand_inputs_for_generation

    @staticmethod  # type: ignore[misc]
    def expand(expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any) -> Any:
        return of_today(model, expand_size, is_encoder_decoder, input_ids, **kwargs)

    monkeypatch.setattr(mixin, "_expand_inputs_for_generation", expand)
    assert torch.equal(model.generate(ids, **options), want)


class Projections(nn.Module):
    """Queries, keys and values, which a module of their own attended with."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = layer.q_proj, layer.k_proj, layer.v_proj
        self.heads = layer.num_attention_heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        parts = (part(hidden_states) for part in (self.query, self.key, self.value))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Output(nn.Module):
    """The output projection, beside them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.dense = layer.o_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)  # type: ignore[no-any-return]


def older(layer: Any) -> nn.Module:
    """The same attention in two modules, of the class that today has one."""

    class TwoModules(type(layer)):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.attention, self.output = Projections(layer), Output(layer)

        def forward(self, hidden_states: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
            return self.output(self.attention(hidden_states)), None

    return TwoModules()


@torch.no_grad()
@pytest.mark.parametrize("memory", ["grc", "memorizing", "rmt"])
def test_an_attention_of_two_modules_takes_the_same_memory(memory: str) -> None:
    """Two images, the second behind what the first one has left."""
    family = patches("Dinov2", "DINOv2")
    results = []
    for shape in (lambda layer: layer, older):
        model = family.build()
        for block in (module for module in model.modules() if type(module).__name__ == "Dinov2Layer"):
            block.attention = shape(block.attention)
        torch.manual_seed(1)
        spec = STREAMS.get(memory, {"name": memory})
        model = add_memory(model, spec, **(family.carrying if memory in STREAMS else family.options)).train()
        torch.manual_seed(2)
        first = model(**family.given())
        carried = {"memory_state": first.memory_state} if memory in STREAMS else {}
        second = model(**family.given(1), **carried)
        results.append([family.output(first), family.output(second)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (results[0][0] - results[0][1]).abs().max() > 1e-4
