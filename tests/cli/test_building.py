"""A configuration is checked on the meta device, which must accept and refuse the same ones as the CPU."""

from __future__ import annotations

import pytest
import torch
from contract.contract_cases import CASES, Case

from cached_lab.experiments import build
from cached_lab.experiments.build import filled, refuse_what_cannot_be_built
from cached_lab.tasks.recipes import load_config
from cached_transformers.registry import ATTENTIONS
from cached_transformers.torchvision_guard import ensure_torchvision

ALONE = [case for case in CASES if case.attention == "softmax"]
ALONE += [Case("none", attention.name, "sequence_classifier") for attention in ATTENTIONS]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case.memory}-{case.attention}-{case.model}")
def test_the_meta_device_takes_and_refuses_what_the_cpu_does(case: Case) -> None:
    refused = []
    for device in ("cpu", "meta"):
        try:
            with torch.device(device):
                model = case.build()
        except ValueError as error:
            refused.append(str(error))
        else:
            assert {tensor.device.type for tensor in model.parameters()} == {device}
    assert len(refused) in (0, 2) and len({*refused}) < 2


def test_data_are_read_only_where_something_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_dataset", lambda *_: pytest.fail("the data were read"))
    sizes = ["model.image_size=8", "model.channels=1", "model.classes=10"]
    whole = load_config("digits_vit_plain", sizes)
    assert filled(whole) is whole
    refuse_what_cannot_be_built(whole)
    for size in sizes:
        with pytest.raises(pytest.fail.Exception, match="the data were read"):
            filled(load_config("digits_vit_plain", [other for other in sizes if other != size]))


def test_weights_to_begin_with_are_not_read(tmp_path) -> None:
    ensure_torchvision()
    pytest.importorskip("timm")
    recipe = load_config("coco_mini_mask_rcnn", [f"model.checkpoint={tmp_path / 'absent'}", "model.classes=3"])
    refuse_what_cannot_be_built(recipe)
