"""TTT against a twin that takes one token after the other, recorded values of other layers, its limits, stability.

Legend: B rows, H heads, N tokens, E head width, D model width, G heads of a model, P its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memories import harness
from memories.harness import DOUBLE, HEADS, ROWS, WIDTH, agree, build, recorded, segments, wild
from memories.ttt_twin import SlowTTT, heads, passed
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.memories.parts import fast_weights
from cached_transformers.memories.parts.fast_weights import Learned, activate, slope
from cached_transformers.memories.ttt import TTT, InnerModel


def layer(**options: Any) -> TTT:
    """A memory whose parameters all differ from where they begin."""
    torch.manual_seed(0)
    return wild(TTT(WIDTH, HEADS, **{"mini_batch": 4, **options}))  # type: ignore[no-any-return]


KINDS = [
    {"mini_batch": 4},
    {"mini_batch": 1},
    {"mini_batch": 16, "rotary": False},
    {"model": "mlp", "mini_batch": 3, "rate": 1.0},
    {"mini_batch": 2, "limit": 0.2},
]


@pytest.mark.parametrize(
    ("options", "padded"), [*((o, True) for o in KINDS), *((o, False) for o in KINDS[:1])], ids=str
)
def test_a_model_is_its_slow_twin_with_gradients(options: dict[str, Any], padded: bool) -> None:
    model = build({"name": "ttt", **options})
    hidden = harness.paddings(3) if padded else [None] * 3
    harness.same_as_twin(model, harness.slowly(model, SlowTTT), segments(3), hidden)


@pytest.mark.parametrize("cuts", [[1] * 13, [5, 5, 3], [4, 4, 5], [2, 11], [13]], ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_any_cut_of_a_stream_gives_the_whole_with_gradients(options: dict[str, Any], cuts: list[int]) -> None:
    """By the twin in one piece: its loop knows of no pieces."""
    memory = layer(**options)
    x_BND = torch.randn(ROWS, 13, WIDTH, **DOUBLE).requires_grad_()
    sides = [passed(one, x_BND, pieces) for one, pieces in ((memory, cuts), (SlowTTT(memory), [13]))]
    assert torch.equal(sides[0][1].tokens_B, sides[1][1].tokens_B)
    leaves = {"x": x_BND, **dict(memory.inner.named_parameters()), **dict(memory.step.named_parameters())}
    got, wanted = ([out, *state[:2]] for out, state in sides)
    agree(got, wanted, leaves, rtol=1e-9, grads=1e-9, least=None if options["mini_batch"] == 1 else 1e-3)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_slopes_are_those_of_autograd_and_finite_everywhere(kind: Any) -> None:
    z = torch.linspace(-12, 12, 101, **DOUBLE).requires_grad_()
    (wanted,) = torch.autograd.grad(activate(z, kind).sum(), z, create_graph=True)
    torch.testing.assert_close(slope(z, kind), wanted, rtol=0, atol=1e-12)
    second = [torch.autograd.grad(t.sum(), z, retain_graph=True)[0] for t in (slope(z, kind), wanted)]
    torch.testing.assert_close(*second, rtol=0, atol=1e-11)
    assert torch.equal(slope(torch.tensor([1e30, -1e30]), kind), torch.tensor([1.0, 0.0]))


def test_a_repeated_pair_is_learned() -> None:
    """What f says of the key goes to what was asked of it, as near as a layer norm can: LN(f) = v - k of unit size."""
    memory = layer(mini_batch=2, rotary=False, rate=4.0)
    inner = memory.inner
    with torch.no_grad():
        inner.norm_weight_GV.fill_(1)
        inner.norm_bias_GV.zero_()
    k = torch.randn(1, HEADS, 1, 4, **DOUBLE)
    v = k + F.layer_norm(torch.randn(1, HEADS, 1, 4, **DOUBLE), (4,))
    many = [t.expand(-1, -1, 400, -1) for t in (k, k, v)]
    none_B = torch.zeros(1, dtype=torch.long)
    learned = inner.start(inner.empty(1, k), none_B == 0)
    rate_BHN, there_BN = torch.full((1, HEADS, 400), 0.2, **DOUBLE), torch.ones(1, 400, dtype=torch.bool)
    f, _ = inner(learned, none_B, *many, rate_BHN, there_BN)
    torch.testing.assert_close(inner.normed(f[:, :, -1:]), v - k, rtol=0, atol=1e-3)


def test_tokens_of_a_model_memory_read_and_write_nothing() -> None:
    """Those in front read what the last token before the segment has left, those behind what its last one leaves."""
    memory = layer(mini_batch=3, rotary=False)
    x_BND = torch.randn(ROWS, 9, WIDTH, **DOUBLE)
    _, state = passed(memory, torch.randn(ROWS, 4, WIDTH, **DOUBLE), [4])
    alone = memory.read(state, Query(x_BND[:, 2:6]))
    around = memory.read(state, Query(x_BND, segment=(2, 4)))
    assert alone.output_BHNE is not None and around.output_BHNE is not None
    torch.testing.assert_close(around.output_BHNE[:, :, 2:6], alone.output_BHNE, rtol=0, atol=1e-12)
    for one, other in zip(around.carry, alone.carry, strict=True):
        assert torch.equal(one, other)
    # A token that learns nothing reads with the mean of its mini-batch so far: of rate 0, tau as it is for each place.
    nn.init.zeros_(memory.inner.tau_C)
    nn.init.constant_(memory.step.bias, -1e9)
    still = memory.read(state, Query(x_BND, segment=(2, 4)))
    assert still.output_BHNE is not None
    share = torch.tensor(1.0, **DOUBLE)  # four tokens before: the second mini-batch has one
    weights_BGP = state.weights_BGP + share * state.sums_BGP
    q_BHNE = heads(memory.query(x_BND[:, :2]))
    z_BND = (q_BHNE + memory.inner.normed(memory.inner.read(weights_BGP, q_BHNE))).transpose(1, 2).flatten(2)
    torch.testing.assert_close(still.output_BHNE[:, :, :2].transpose(1, 2).flatten(2), memory.norm(z_BND))


def hard(tokens: int, seed: int) -> Tensor:
    """Streams (5, N, D): three tokens again and again, new ones; both a thousand times as large; and in turns."""
    generator = torch.Generator().manual_seed(seed)
    new_ND = torch.randn(tokens, WIDTH, generator=generator)
    few_ND = new_ND[:3].repeat(-(-tokens // 3), 1)[:tokens]
    turns_N1 = 1 + 999 * (torch.arange(tokens) // 64 % 2)[:, None]
    return torch.stack([few_ND, 1000 * few_ND, new_ND, 1000 * new_ND, turns_N1 * new_ND])


def drive(tokens: int, dtype: torch.dtype, seed: int, **options: Any) -> Tensor:
    """Read them at the largest rate; the root mean square (segments, 5) of the weights behind each 256 tokens."""
    torch.manual_seed(seed)
    memory, sizes = TTT(WIDTH, HEADS, **options).to(dtype).eval(), []
    with torch.no_grad():
        nn.init.zeros_(memory.step.weight)
        nn.init.constant_(memory.step.bias, 50.0)
        streams_BND = hard(tokens, seed).to(dtype)
        state = memory.init_state(len(streams_BND), streams_BND)
        for x_BND in streams_BND.split(256, 1):
            reading = memory.read(state, Query(x_BND))
            assert reading.output_BHNE is not None and reading.output_BHNE.isfinite().all()
            state = memory.write(state, Trace(x_BND, x_BND, Query(x_BND), reading))[0]
            sizes.append(state.weights_BGP.square().mean((1, 2)).sqrt())
        assert state.sums_BGP.isfinite().all()
    return torch.stack(sizes)


HARD = [{}, {"mini_batch": 64}, {"model": "mlp"}, {"rate": 100.0}, {"model": "mlp", "rate": 100.0}, {"limit": 1.0}]
HARD += [{"mini_batch": 2}]


@harness.long_streams
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", HARD, ids=str)
def test_repeated_inputs_of_any_size_leave_it_finite(
    options: dict[str, Any], dtype: torch.dtype, tokens: int, seed: int
) -> None:
    """The second half of many lengthens the weights by a third at most; it has as many steps as the first."""
    sizes = drive(tokens, dtype, seed, **options)
    assert tokens < 65536 or (sizes[-1] < 4 / 3 * sizes[len(sizes) // 2]).all()
    assert options.get("limit") is None or sizes.max() < 2 * options["limit"]


def test_a_step_never_shortens_the_weights_of_a_linear_model() -> None:
    """Its gradient is orthogonal to them, but for the epsilon of the norm: only the direction of f(k) counts."""
    inner = layer().inner
    generator = torch.Generator().manual_seed(0)
    k, wanted = (torch.randn(ROWS, HEADS, 4, 4, generator=generator, **DOUBLE) for _ in range(2))
    W = inner.matrices(inner.initial_GP[None].expand(ROWS, -1, -1))
    inputs, errors = inner.surprise(W, F.pad(k, (0, 1), value=1.0), wanted)
    gradient = inputs[0].mT @ errors[0]
    along = (gradient * W[0]).sum((-2, -1)) / gradient.norm(dim=(-2, -1)) / W[0].norm(dim=(-2, -1))
    assert along.abs().max() < 1e-3 and gradient.abs().max() > 0.1


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
    rates, end = (torch.ones_like(eta),), (eta[..., -1:, :], torch.zeros_like(eta[..., -1:, :]))
    learned = Learned(first_BGP, torch.zeros_like(first_BGP))
    out, after = inner.through(learned, q * 8**-0.5, k, v - k, coefficients, rates, end)
    assert out is not None
    out = out.flatten(2, 3)
    torch.testing.assert_close((out + inner.normed(out)).transpose(1, 2), given[f"{tag}/out"], rtol=0, atol=1e-12)
    state = inner.matrices(after.weights_BGP)[0]
    torch.testing.assert_close(state[..., :-1, :], given[f"{tag}/state"], rtol=0, atol=1e-12)
    torch.testing.assert_close(state[..., -1:, :], given[f"{tag}/bias"], rtol=0, atol=1e-12)
