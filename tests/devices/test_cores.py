"""Every registered attention on a device, in both forms that it has: values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from attentions.cases import CASES, H, build
from attentions.test_battery import NAMES, causal_forms, inputs
from devices.precision import GRADIENTS, VALUES, dtypes, gradients_near, near, rounded

pytestmark = pytest.mark.device
TOKENS = 24


def attended(core: torch.nn.Module, given: dict[str, torch.Tensor], causal: bool, padded: bool) -> torch.Tensor:
    padding = None
    if padded:
        padding = torch.arange(TOKENS, device=given["q"].device).expand(len(given["q"]), -1) >= TOKENS - 3
    out = core(given["q"], given["k"], given["v"], causal=causal, x_BND=given["x"], key_padding_mask=padding)
    return out.out_BHNV[:, :, : TOKENS - 3]  # type: ignore[no-any-return]


@dtypes
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_it_is_in_float64(name: str, padded: bool, dtype: torch.dtype, device: str) -> None:
    with torch.device("cpu"):
        core, given = build(name), {key: t.to(dtype) for key, t in inputs(TOKENS).items()}
    if padded and "exact_padding" not in core.can:
        pytest.skip("it takes no padding mask")
    for causal in causal_forms(name):
        twin, ours = rounded(core, dtype), copy.deepcopy(core).to(device, dtype)
        wide = {key: t.double().detach().clone().requires_grad_() for key, t in given.items()}
        here = {key: t.to(device).detach().clone().requires_grad_() for key, t in given.items()}
        with torch.device("cpu"):
            want = attended(twin, wide, causal, padded)
        got = attended(ours, here, causal, padded)
        assert got.shape[1] == H and got.device.type == device and got.dtype == dtype and got.isfinite().all()
        if dtype == torch.bfloat16 and "precision" in CASES[name].exempt:
            continue
        near(got, want, VALUES[dtype], f"causal={causal}")
        got.float().square().sum().backward()
        want.square().sum().backward()
        gradients_near(*([t.grad for t in side.values()] for side in (here, wide)), GRADIENTS[dtype])
