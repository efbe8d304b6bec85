"""Refusals of diagonal batching, and the comparison of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import refuses
from contract.contract_cases import SEGMENT, VOCABULARY
from models.test_diagonal import batch
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.vmap_blocks import difference
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.loops.streaming import read_stream
from cached_transformers.models.diagonal import read_diagonally
from cached_transformers.models.language_model import LanguageModel

SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "feed_forward": 16}


def made(depth: int = 2, name: str = "language_model", **options: Any) -> Any:
    return create_model(name, **{**SIZES, "depth": depth, **options})


def classifier(**options: Any) -> Any:
    return made(name="sequence_classifier", classes=2, max_length=8, **options)


def hooked(path: str) -> nn.Module:
    model = made()
    model.get_submodule(path).register_forward_hook(lambda *_: None)
    return model


def with_feed_forward(kind: type[nn.Module]) -> nn.Module:
    model = made()
    for block in model.stack.blocks:
        block.feed_forward = kind()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "model memory": (lambda: made(memory="rmt"), "memory RMT spans the layers"),
    "feedback": (lambda: made(memory="feedback"), "memory Feedback spans the layers"),
    "shared": (lambda: classifier(memory="grc"), "memory GRC is shared by all rows"),
    "last token": (lambda: classifier(pool="last"), "pool='last' is not offered"),
    "reversible": (lambda: made(reversible=True), "reversible=True computes activations again"),
    "one layer": (lambda: made(depth=1), "there is one layer"),
    "unlike layers": (lambda: made(attention="sparse_transformer"), r"they differ in 'attention\.core\.index'"),
    "other models": (lambda: made(name="encoder_decoder", max_length=8), "EncoderDecoder does not offer its parts"),
    "compiled": (lambda: torch.compile(made()), "would leave out its compiled forward"),
    "hooks": (lambda: hooked("stack"), "would leave out the hooks on its own calls"),
    "hooks inside": (lambda: hooked("stack.blocks.1.feed_forward"), r"they differ in 'feed_forward\._forward_hooks'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_crosses_the_layers_is_refused_by_name(kind: str) -> None:
    build_model, message = REFUSED[kind]
    model = build_model()
    with pytest.raises(ValueError, match=f"schedule='diagonal'.*{message}.*(schedule='segments'|compile the loop)"):
        SegmentLoop(model, SEGMENT, schedule="diagonal")
    refuses(message, next, read_stream(model, [[1, 2, 3]], SEGMENT, schedule="diagonal"))


def test_other_loops_are_refused_and_other_errors_stay() -> None:
    model = made()
    refuses("'diagonals'", SegmentLoop, model, SEGMENT, schedule="diagonals")
    refuses(r"passes=2.*schedule='segments'.*passes=1", SegmentLoop, model, SEGMENT, passes=2, schedule="diagonal")
    refuses("ReplayLoop", ReplayLoop, model, SEGMENT, schedule="diagonal")
    loop = SegmentLoop(model, SEGMENT, schedule="diagonal")
    model.stack.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="would leave out the hooks"):
        loop(*batch(SEGMENT))  # registered since
    refuses("targets of shape", next, read_diagonally(made(), [(batch(6)[0], batch(5)[1], None)]))

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] == SEGMENT:
                raise RuntimeError("out of luck")
            return x

    with pytest.raises(RuntimeError, match="out of luck"):
        SegmentLoop(with_feed_forward(Failing), SEGMENT, schedule="diagonal")(*batch(2 * SEGMENT))


def test_a_stream_keeps_its_rows_and_buffers_are_not_lost() -> None:
    inputs, _ = batch(2 * SEGMENT)
    first, second = inputs.split(SEGMENT, 1)
    with pytest.raises(ValueError, match=r"the state has 3 rows .*, the segment 2"):
        list(read_diagonally(made(), [(first, None, None), (second[:2], None, None)]))
    with pytest.raises(ValueError, match=r"0,.*feed_forward\.count"):
        SegmentLoop(with_feed_forward(Exchanging), SEGMENT, schedule="diagonal")(*batch(2 * SEGMENT))


def test_a_forward_that_is_not_made_of_the_parts_is_refused() -> None:
    class Louder(LanguageModel):
        def forward(self, *given: Any, **options: Any) -> ModelOutput:
            out = super().forward(*given, **options)
            return out._replace(outputs=2 * out.outputs)

    class Whole(Louder):
        def answer(self, h_BND: Tensor, targets: Tensor | None = None) -> Tensor:
            return 2 * super().answer(h_BND, targets)

    with pytest.raises(ValueError, match="Louder overrides forward but not embed and answer"):
        SegmentLoop(Louder(VOCABULARY, 16, 2, 2, 16), SEGMENT, schedule="diagonal")
    SegmentLoop(Whole(VOCABULARY, 16, 2, 2, 16), SEGMENT, schedule="diagonal")


class Exchanging(nn.Module):
    """A feed-forward that replaces its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + x.mean()
        return x


def test_what_makes_two_modules_unlike() -> None:
    a, b = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)), nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1))
    assert difference(a, b) is None
    b[1].p = 0.2
    assert difference(a, b) == "1.p"
    b[1].p = 0.1
    b[0].table = torch.ones(2)
    assert difference(a, b) == "0.table"
    a[0].table = torch.ones(2)
    assert difference(a, b) is None
    b.eval()
    assert difference(a, b) == "training"
    assert difference(nn.Linear(2, 3), nn.Linear(2, 3, bias=False)) in ("_parameters", "bias")
    assert difference(nn.Linear(2, 3), nn.Linear(2, 4)) is not None
    assert difference(nn.GELU(), nn.ReLU()) == ""
