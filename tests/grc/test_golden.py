"""GRC against recorded values: the authors' released module, and an independent restatement of the paper's Algorithm 1.

Every output, stored cache, attended cache and gradient of three training steps and of evaluation, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grc.golden import Attended, Golden, Place, check_gradients, close, load, paper_places, released_places
from grc.mini_pvt import MiniPVT
from grc.mini_pvt import places as mini_pvt_places
from torch import Tensor

from cached_transformers import GRCAttention
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.positions import RelativePositionBias2D, grid_positions

pytestmark = pytest.mark.usefixtures("double")

PAPER = ["T12_Tm12", "T12_Tm12_persample", "T12_Tm12_vproj", "T13_Tm8_nearest", "varT_17_10_26_Tm17_linear"]
RELEASED = [
    "r050_T12_Tm12_cls0_nopos",
    "r050_T13_Tm20_nopos",
    "r050_T13_Tm8_nopos",
    "r050_T17_Tm17_cls1_pos",
    "pvt_sr2_r050_T16",
    "swin_win3_r050_mask",
]


@pytest.fixture
def folder(shared: Path) -> Path:
    return shared / "golden" / "grc"


@pytest.mark.device
def test_every_file_has_a_test(folder: Path) -> None:
    tested = (
        {f"paper_r050_{n}.npz" for n in PAPER} | {f"official_{n}.npz" for n in RELEASED} | {"official_minipvt_r050.npz"}
    )
    assert tested == {p.name for p in folder.glob("*.npz")}


@pytest.mark.device
@pytest.mark.parametrize("name", PAPER)
def test_paper(folder: Path, name: str) -> None:
    golden = Golden(folder / f"paper_r050_{name}.npz")
    meta = golden.meta
    options = {name: meta[name] for name in ("ratio", "attend")} | {"interpolation": meta["mode"]}
    options |= {"variant": "paper", "combine": {"pad": "pad", "vproj": "project"}[meta["combine"]]}
    layer = GRCAttention(meta["dim"], meta["heads"], meta["Tm"], **options)
    places = paper_places(meta["dim"], int(meta["dim"] * meta["ratio"]))
    load(layer, golden, places)
    memory: GRC = layer.memory  # type: ignore[assignment]
    memory.cache.cache_MC.copy_(golden["cache/0"])
    attended = Attended(memory)
    for t in (1, 2, 3):
        step(layer, golden, places, t)
        memory.cache.commit()
        close(memory.cache.cache_MC, golden[f"cache/{t}"], f"cache/{t}")
        close(attended.value.expand_as(golden[f"attended/{t}"]), golden[f"attended/{t}"], f"attended/{t}")
    # The restatement freezes the cache in evaluation also where training attends each row's own update.
    memory.cache.attend = "mean"
    layer.eval()
    x = golden["eval_x/1"].requires_grad_()
    y = layer(x).y_BND
    close(y, golden["eval_y/1"], "eval_y/1")
    (y * golden["eval_gy/1"]).sum().backward()
    close(x.grad, golden["eval_gx/1"], "eval_gx/1")  # type: ignore[arg-type]
    check_gradients(layer, golden, places, "eval_grad/1/")
    close(memory.cache.cache_MC, golden["cache/3"], "cache after evaluation")
    with torch.no_grad():
        close(layer(x).y_BND, golden["eval_y/1"], "folded")


def step(layer: torch.nn.Module, golden: Golden, places: dict[str, Place], t: int, **inputs: Any) -> None:
    """One recorded training step: output, gradient of the input, gradients of all parameters."""
    x = golden[f"x/{t}"].requires_grad_()
    out = layer(x, **inputs)
    y = out if isinstance(out, Tensor) else out.y_BND
    close(y, golden[f"y/{t}"], f"y/{t}")
    (y * golden[f"gy/{t}"]).sum().backward()
    if f"gx/{t}" in golden:
        close(x.grad, golden[f"gx/{t}"], f"gx/{t}")  # type: ignore[arg-type]
    check_gradients(layer, golden, places, f"grad/{t}/")


@pytest.mark.device
@pytest.mark.parametrize("name", RELEASED)
def test_released(folder: Path, name: str) -> None:
    golden = Golden(folder / f"official_{name}.npz")
    meta = golden.meta
    width, heads, ratio = meta["dim"], meta["heads"], meta["ratio"]
    cache = int(width * ratio)
    window = tuple(meta["window"]) if "window" in meta else None
    size = (meta["H"], meta["W"]) if "H" in meta else window
    layer = GRCAttention(
        width,
        heads,
        meta["Tm"],
        variant="released",
        ratio=ratio,
        bias=meta["qkv_bias"],
        prefix=meta["cls_dim"],
        size=size,
        window=window,
        positional_convolution=meta["pos"],
        positions=RelativePositionBias2D(window, heads) if window else None,
        reduction=meta.get("sr_ratio", 1),
    )
    places = released_places(width, cache, golden.names("param/"))
    load(layer, golden, places)
    memory: GRC = layer.memory  # type: ignore[assignment]
    if "cache/0" in golden:
        memory.cache.cache_MC.copy_(golden["cache/0"][0])
    attended = Attended(memory)
    inputs: dict[str, Any] = {"size": size}
    if window:
        inputs["positions_BNP"] = grid_positions(window)
    for t in (1, 2, 3):
        masked = inputs | ({"bias_BHNM": shift(golden, f"x/{t}")} if "mask" in golden else {})
        step(layer, golden, places, t, **masked)
        memory.cache.commit()
        close(memory.cache.cache_MC, golden[f"cache/{t}"][0], f"cache/{t}")
        close(attended.value, golden[f"attended/{t}"], f"attended/{t}")
    layer.eval()
    for i in sorted(int(n) for n in golden.names("eval_x/")):
        masked = inputs | ({"bias_BHNM": shift(golden, f"eval_x/{i}")} if "mask" in golden else {})
        close(layer(golden[f"eval_x/{i}"], **masked).y_BND, golden[f"eval_y/{i}"], f"eval_y/{i}")
        close(attended.value, golden[f"eval_attended/{i}"], f"eval_attended/{i}")
        close(memory.cache.cache_MC, golden[f"eval_cache/{i}"][0], f"eval_cache/{i}")


def shift(golden: Golden, x: str) -> Tensor:
    """The recorded shift mask, for windows of all images: (rows, 1, tokens, tokens)."""
    images = golden[x].shape[0] // golden["mask"].shape[0]
    return golden["mask"].repeat(images, 1, 1)[:, None]


@pytest.mark.device
def test_released_pyramid(folder: Path) -> None:
    golden = Golden(folder / "official_minipvt_r050.npz")
    model = MiniPVT(golden.meta)
    places = mini_pvt_places(golden)
    load(model, golden, places)
    attended = {name: Attended(memory) for name, memory in model.memories().items()}
    for t in (1, 2, 3):
        step(model, golden, places, t)
        for name, memory in model.memories().items():
            memory.cache.commit()
            close(memory.cache.cache_MC, golden[f"cache/{name}/{t}"][0], f"cache/{name}/{t}")
            close(attended[name].value, golden[f"attended/{name}/{t}"], f"attended/{name}/{t}")
    model.eval()
    close(model(golden["eval_x/1"]), golden["eval_y/1"], "eval_y/1")
    for name, memory in model.memories().items():
        close(attended[name].value, golden[f"eval_attended/{name}/1"], f"eval_attended/{name}")
        close(memory.cache.cache_MC, golden[f"eval_cache/{name}/1"][0], f"eval_cache/{name}")
