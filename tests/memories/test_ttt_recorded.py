"""TTT beside recorded values: the layers of its authors, and another rule whose chunks are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memories.harness import HEADS, recorded
from memories.ttt_twin import heads, passed
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.memories.parts import fast_weights
from cached_transformers.memories.parts.fast_weights import Learned
from cached_transformers.memories.ttt import TTT, InnerModel


def golden(shared: Path, tag: str) -> dict[str, Tensor]:
    return recorded(shared, "recurrent/ttt_layers", f"{tag}/")


def as_released(given: dict[str, Tensor], model: str) -> TTT:
    """The memory with the parameters of the recorded layer."""
    memory = TTT(12, HEADS, model=model, mini_batch=4).double()  # type: ignore[arg-type]
    parameters = {k.removeprefix("param/"): v for k, v in given.items() if k.startswith("param/")}
    matrices = [(parameters["W1"], parameters["b1"])]
    if model == "mlp":
        matrices.append((parameters["W2"], parameters["b2"]))
    with torch.no_grad():
        memory.inner.initial_GP.copy_(torch.cat([torch.cat(pair, 1).flatten(1) for pair in matrices], 1))
        memory.inner.norm_weight_GV.copy_(parameters["ttt_norm_weight"])
        memory.inner.norm_bias_GV.copy_(parameters["ttt_norm_bias"])
        memory.inner.tau_C.copy_(parameters["learnable_token_idx"])
        memory.step.weight.copy_(parameters["learnable_ttt_lr_weight"][:, 0])
        memory.step.bias.copy_(parameters["learnable_ttt_lr_bias"][:, 0])
        memory.norm.weight.copy_(parameters["post_norm.weight"])
        memory.norm.bias.copy_(parameters["post_norm.bias"])
        for name, linear in (("q", memory.query), ("k", memory.key), ("v", memory.value)):
            if f"{name}_proj.weight" in parameters:
                linear.weight.copy_(parameters[f"{name}_proj.weight"])
    return memory


@pytest.mark.device
@pytest.mark.parametrize("tag", ["linear", "linear_mamba", "mlp"])
def test_what_it_learns_is_what_the_authors_layers_learn(shared: Path, tag: str) -> None:
    """Of recorded queries and keys: the rates, what is read, and the state behind the last whole mini-batch."""
    given = golden(shared, tag)
    memory = as_released(given, "mlp" if tag == "mlp" else "linear")
    x_BND, q, k = given["x"][:, :8], given["XQ"][:, :, :8], given["XK"][:, :, :8]
    v = heads(x_BND @ given["param/v_proj.weight"].T)
    rate_BHN = memory.rate * memory.step(x_BND).sigmoid().mT
    eta = (memory.inner.shares(x_BND.dtype)[:, None] * rate_BHN.unflatten(-1, (-1, 1, 4))).tril()
    torch.testing.assert_close(eta, given["eta"].tril(), rtol=0, atol=1e-12)
    none_B = torch.zeros(2, dtype=torch.long)
    start = memory.inner.start(memory.inner.empty(2, x_BND), none_B == 0)
    there_BN = torch.ones(2, 8, dtype=torch.bool)
    f, after = memory.inner(start, none_B, q, k, v, rate_BHN, there_BN)
    z_BND = (q + memory.inner.normed(f)).transpose(1, 2).flatten(2)
    close = {"rtol": 0, "atol": 1e-9 if tag == "mlp" else 1e-12}  # their slope of gelu has constants of 8 digits
    torch.testing.assert_close(z_BND, given["inner_out"], **close)
    learned = [part for t in memory.inner.matrices(after.weights_BGP) for part in (t[..., :-1, :], t[..., -1:, :])]
    for name, got in zip(("W1", "b1", "W2", "b2"), learned, strict=False):
        torch.testing.assert_close(got, given[f"after/{name}"], **close)
    assert not after.sums_BGP.any()


@pytest.mark.device
@pytest.mark.parametrize("cuts", [[11], [3, 6, 2], [1] * 11], ids=str)
@pytest.mark.parametrize("tag", ["linear", "mlp"])
def test_the_layer_is_that_of_the_authors_wherever_it_is_cut(shared: Path, tag: str, cuts: list[int]) -> None:
    """With a projection behind it; its last mini-batch is open. Our rotation has angles in float32."""
    given = golden(shared, tag)
    memory, x_BND = as_released(given, tag), given["x"].requires_grad_()
    out_BHNE, _ = passed(memory, x_BND, cuts)
    out = out_BHNE.transpose(1, 2).flatten(2) @ given["param/o_proj.weight"].T
    (gradient,) = torch.autograd.grad((out * given["grad_w_out"]).sum(), x_BND)
    torch.testing.assert_close(out, given["out"], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, given["grad_x"], rtol=1e-5, atol=1e-5 * given["grad_x"].abs().max().item())


@pytest.mark.device
def test_the_layer_of_the_mamba_backbone_is_it_with_convolutions_and_a_gate_around(shared: Path) -> None:
    given = golden(shared, "linear_mamba")
    memory, x_BND = as_released(given, "linear"), given["x"].requires_grad_()
    shared_BDN = (x_BND @ given["param/q_proj.weight"].T).mT

    def convolved(name: str) -> Tensor:
        weight, bias = (given[f"param/conv_{name}.{part}"] for part in ("weight", "bias"))
        return heads(F.conv1d(F.pad(shared_BDN, (3, 0)), weight, bias, groups=12).mT)

    there_BN, none_B = torch.ones(2, 11, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    places_BN = memory.inner.places(none_B, there_BN)
    q, k = (memory._turned(convolved(name), places_BN) for name in ("q", "k"))
    torch.testing.assert_close(q, given["XQ"], rtol=0, atol=1e-5)
    rate_BHN = memory.rate * memory.step(x_BND).sigmoid().mT
    start = memory.inner.start(memory.inner.empty(2, x_BND), none_B == 0)
    v = heads(x_BND @ given["param/v_proj.weight"].T)
    f, _ = memory.inner(start, none_B, q, k, v, rate_BHN, there_BN)
    z_BND = memory.norm((q + memory.inner.normed(f)).transpose(1, 2).flatten(2))
    gate_BND = F.gelu(x_BND @ given["param/g_proj.weight"].T, approximate="tanh")
    out = (gate_BND * z_BND) @ given["param/o_proj.weight"].T
    (gradient,) = torch.autograd.grad((out * given["grad_w_out"]).sum(), x_BND)
    torch.testing.assert_close(out, given["out"], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, given["grad_x"], rtol=1e-5, atol=1e-5 * given["grad_x"].abs().max().item())


@pytest.mark.device
@pytest.mark.parametrize(("tag", "size"), [("mb1", 1), ("whole", 4)])
def test_chunks_give_golden_values_of_another_rule(shared: Path, tag: str, size: int) -> None:
    """fla's reference: the rate of the token that reads counts for all gradients, and o + LN(o) is the output."""
    given = recorded(shared, "recurrent/ttt_linear_core")
    tokens = given[f"{tag}/out"].shape[1]
    inner = InnerModel(2, 8, model="linear", mini_batch=size, limit=1e6).double()
    with torch.no_grad():
        inner.norm_weight_GV.copy_(given["norm_weight"])
        inner.norm_bias_GV.copy_(given["norm_bias"])
    first_BGP = torch.cat([given["weight0"], given["bias0"]], 2).flatten(2)
    q, k, v, eta = (given[n][:, :tokens].transpose(1, 2).unflatten(2, (-1, size)) for n in ("q", "k", "v", "eta"))
    coefficients = fast_weights.FastReading(torch.ones_like(eta), eta, eta.expand(-1, -1, -1, -1, size).tril())
    end = (torch.ones_like(eta), eta[..., -1:, :], torch.zeros_like(eta[..., -1:, :]))
    learned = Learned(first_BGP, torch.zeros_like(first_BGP))
    out, after = inner.through(learned, q * 8**-0.5, k, v - k, coefficients, end)
    assert out is not None
    out = out.flatten(2, 3)
    torch.testing.assert_close((out + inner.normed(out)).transpose(1, 2), given[f"{tag}/out"], rtol=0, atol=1e-12)
    state = inner.matrices(after.weights_BGP)[0]
    torch.testing.assert_close(state[..., :-1, :], given[f"{tag}/state"], rtol=0, atol=1e-12)
    torch.testing.assert_close(state[..., -1:, :], given[f"{tag}/bias"], rtol=0, atol=1e-12)
