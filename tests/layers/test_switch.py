"""Switch feed-forward: a slow twin with loops, limiting cases, capacity, losses, counting, and transformers' own layer.

Legend: B rows, N tokens of a row, T tokens, E experts, D model width, F hidden width.
"""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from typing import Any

import pytest
import torch
from common import refuses
from integrations.hosts import library
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers.layers import SwitchFeedForward
from cached_transformers.layers.switch import balance_loss, make_feed_forward, z_loss
from cached_transformers.models import LanguageModel

B, N, D, F, E = 3, 7, 8, 12, 4


def made(seed: int = 0, **options: Any) -> SwitchFeedForward:
    torch.manual_seed(seed)
    module = SwitchFeedForward(D, F, options.pop("experts", E), **options)
    with torch.no_grad():
        module.router_ED.normal_()  # decided choices
        for bias in (module.enter_bias_EF, module.leave_bias_ED):
            if bias is not None:
                bias.normal_()
    return module


def tokens(seed: int = 1, rows: int = B, length: int = N) -> Tensor:
    """Tokens with so much in common that some experts get more than their share."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(D, generator=generator) + torch.randn(rows, length, D, generator=generator)


def some_padding() -> Tensor:
    return torch.arange(N) >= torch.tensor([N, 4, 1])[:, None]


def one_expert(module: SwitchFeedForward, expert: int, x_D: Tensor) -> Tensor:
    hidden = x_D @ module.enter_EDF[expert]
    if module.enter_bias_EF is not None:
        hidden = hidden + module.enter_bias_EF[expert]
    out = module.activation(hidden) @ module.leave_EFD[expert]
    return out if module.leave_bias_ED is None else out + module.leave_bias_ED[expert]


def twin(module: SwitchFeedForward, x_BND: Tensor, padding_BN: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """One token after the other, as equations 1 to 6 of the paper say: the result, the loss, and the dropped tokens."""
    factor = 1.25 if module.training else 2.0
    valid = torch.ones(x_BND.shape[:2], dtype=torch.bool) if padding_BN is None else ~padding_BN
    count = int(valid.sum())
    capacity = math.ceil(count * factor / module.experts)
    taken, dropped = [0] * module.experts, 0
    chosen: list[int] = []
    probabilities: list[Tensor] = []
    squares: list[Tensor] = []
    rows = []
    for row, keep in zip(x_BND, valid, strict=True):
        out = []
        for x_D, counts in zip(module.norm(row), keep, strict=True):
            if not counts:
                out.append(torch.zeros_like(x_D))
                continue
            logits_E = module.router_ED @ x_D
            p_E = logits_E.exp() / logits_E.exp().sum()
            expert = int(p_E.argmax())
            chosen.append(expert)
            probabilities.append(p_E)
            squares.append(logits_E.exp().sum().log() ** 2)
            if taken[expert] == capacity:
                dropped += 1
                out.append(torch.zeros_like(x_D))
                continue
            taken[expert] += 1
            out.append(p_E[expert] * one_expert(module, expert, x_D))
        rows.append(torch.stack(out))
    shares = torch.tensor([chosen.count(expert) / count for expert in range(module.experts)])
    balance = module.experts * (shares * torch.stack(probabilities).mean(0)).sum()
    loss = module.balance_loss * balance + module.z_loss * torch.stack(squares).mean()
    return torch.stack(rows), loss, dropped


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_a_loop_over_the_tokens_gives_the_same_values_and_gradients(training: bool, padded: bool, bias: bool) -> None:
    module = made(norm=nn.LayerNorm(D), bias=bias).train(training)
    padding_BN = some_padding() if padded else None
    found = []
    for run in (module, lambda *arguments: twin(module, *arguments)):
        x_BND = tokens().requires_grad_()
        y_BND, loss, *rest = run(x_BND, padding_BN)
        weight_BND = tokens(2)
        leaves = [x_BND, *module.parameters()]
        found.append((y_BND, loss, torch.autograd.grad((y_BND * weight_BND).sum() + 10 * loss, leaves), rest))
    (y, loss, grads, _), (y_twin, loss_twin, grads_twin, (dropped,)) = found
    torch.testing.assert_close(y, y_twin)
    torch.testing.assert_close(loss, loss_twin)
    torch.testing.assert_close(grads, grads_twin, rtol=1e-4, atol=1e-5)
    count = B * N if padding_BN is None else int((~padding_BN).sum())
    assert module.tallies()["dropped_tokens"].tolist() == ([dropped, count] if training else [0, 0])
    assert dropped > 0 or not training  # or the test would say nothing of what is dropped


def test_the_gate_trains_the_router() -> None:
    """Without the two losses the router's gradient comes only through p: p_e (1[e = chosen] - p) y/p."""
    module = made(balance_loss=0.0, z_loss=0.0, capacity_factor=None)
    x_BND = tokens(rows=1, length=1)
    y_BND, _ = module(x_BND)
    (grad_ED,) = torch.autograd.grad(y_BND.sum(), module.router_ED)
    p_E = (module.router_ED @ x_BND[0, 0]).softmax(-1).detach()
    chosen = int(p_E.argmax())
    through_p = p_E[chosen] * (nn.functional.one_hot(torch.tensor(chosen), E) - p_E)
    expected = one_expert(module, chosen, x_BND[0, 0]).sum() * through_p[:, None] * x_BND[0, 0]
    torch.testing.assert_close(grad_ED, expected.detach())
    assert grad_ED.abs().max() > 1e-3


def test_losses_and_initial_weights_are_those_of_the_papers() -> None:
    even = torch.full((16, 8), 1 / 8)
    assert balance_loss(even, torch.arange(16) % 8).item() == pytest.approx(1.0)
    collapsed = nn.functional.one_hot(torch.full((16,), 3), 8).float()
    assert balance_loss(collapsed, collapsed.argmax(-1)).item() == pytest.approx(8.0)
    assert z_loss(torch.zeros(16, 8)).item() == pytest.approx(math.log(8) ** 2)
    none = torch.zeros(16, dtype=torch.bool)
    assert balance_loss(even, torch.zeros(16, dtype=torch.long), none) == 0 and z_loss(torch.zeros(16, 8), none) == 0
    module = SwitchFeedForward(64, 256, 16)
    for weight, inputs in ((module.router_ED, 64), (module.enter_EDF, 64), (module.leave_EFD, 256)):
        std = math.sqrt(0.1 / inputs)
        assert weight.abs().max() <= 2 * std
        assert weight.std().item() == pytest.approx(0.8796 * std, rel=0.05)  # cut off at two deviations


def test_padding_takes_no_part() -> None:
    """Results and losses equal a batch without padding, for any padded tokens."""
    module, padding_BN = made(), some_padding()
    x_BND = torch.where(padding_BN[..., None], torch.nan, tokens())
    y_BND, loss = module(x_BND, padding_BN)
    alone, loss_alone = module(tokens()[~padding_BN][None])
    torch.testing.assert_close(y_BND[~padding_BN], alone[0])
    torch.testing.assert_close(loss, loss_alone)
    assert not y_BND[padding_BN].any()
    dropped = module.tallies()["dropped_tokens"]
    assert dropped[1] == 2 * (~padding_BN).sum() and dropped[0] > 0
    (x := tokens()).requires_grad_()
    module(x, padding_BN)[0].sum().backward()
    assert x.grad is not None and not x.grad[padding_BN].any()


def test_the_router_computes_in_float32_under_autocast_and_in_half_precision() -> None:
    """Two experts whose logits differ by less than bfloat16 can tell."""
    module = made(experts=2)
    with torch.no_grad():
        module.router_ED[0] = 1.0
        module.router_ED[1] = 1.0 - 2**-12
    x_BND = torch.full((1, 1, D), 8.0)
    expected = module.route(x_BND.flatten(0, 1))[0]
    assert expected.item() > 0.5
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.route(x_BND.flatten(0, 1).bfloat16())[0], expected)
        y_BND, loss = module(x_BND)
    assert loss.dtype == torch.float32 and y_BND.dtype == torch.bfloat16
    half = made().bfloat16()
    y_BND, loss = half(tokens().bfloat16())
    assert y_BND.dtype == torch.bfloat16 and loss.dtype == torch.float32
    twin_y, _, _ = twin(made(), tokens().bfloat16().float())
    # Experts in bfloat16, which has 8 bits, of sums of some ten numbers.
    close = (y_BND.float() - twin_y).abs() <= 0.05 + 0.05 * twin_y.abs()
    assert close.float().mean() > 0.9


def test_jitter_and_dropout_act_on_the_router_and_on_hidden_layers() -> None:
    module = made(jitter=0.5, capacity_factor=None)
    h_TD = tokens().flatten(0, 1)
    plain = (h_TD @ module.router_ED.T).softmax(-1).amax(-1)
    assert not torch.allclose(module.route(h_TD)[0], plain)
    torch.testing.assert_close(module.eval().route(h_TD)[0], plain)
    module = made(expert_dropout=0.99, capacity_factor=None)
    assert module.leave_bias_ED is not None
    y_TD = module(tokens(rows=1, length=200))[0][0]
    p_T, chosen_T, _ = module.route(tokens(rows=1, length=200)[0])
    biases_TD = p_T[:, None] * module.leave_bias_ED[chosen_T]
    assert (y_TD - biases_TD).abs().amax(1).lt(1e-5).float().mean() > 0.8  # .99^12 = .89 have nothing left but the bias
    assert made(dropout=0.25).expert_dropout.p == 0.25 and made(dropout=0.25, expert_dropout=0.4).dropout.p == 0.25


def test_counting_survives_checkpointing_copies_and_moves() -> None:
    module = made()
    x_BND = tokens().requires_grad_()
    checkpoint(lambda x: module(x)[0].sum(), x_BND, use_reentrant=False).backward()
    counts = module.tallies()["dropped_tokens"]
    assert counts[1] == B * N  # once, although it ran twice
    assert module.tallies()["dropped_tokens"].tolist() == [0, 0]
    module(tokens())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.double()):
        assert copied.tallies()["dropped_tokens"].tolist() == counts.tolist()
    on_meta = SwitchFeedForward(D, F, E).to("meta")
    assert on_meta(torch.empty(B, N, D, device="meta"))[0].shape == (B, N, D)
    assert on_meta.to_empty(device="cpu").tallies()["dropped_tokens"].tolist() == [0, 0]
    assert not [name for name in module.state_dict() if "count" in name]


def test_the_result_depends_on_no_neighbour_nor_on_the_absence_of_tokens() -> None:
    module = made(evaluation_capacity_factor=None).eval()
    whole = module(tokens())[0]
    single = torch.cat([module(tokens()[:, place : place + 1])[0] for place in range(N)], 1)
    torch.testing.assert_close(whole, single)
    module = made(capacity_factor=0.0)
    y_BND, _ = module(tokens())
    assert torch.equal(y_BND, torch.zeros(B, N, D))
    assert module.tallies()["dropped_tokens"].tolist() == [B * N, B * N]
    module = made()
    y_BND, loss = module(tokens(), torch.ones(B, N, dtype=torch.bool))
    assert not y_BND.any() and loss == 0
    y_BND, loss = module(tokens()[:, :0])
    assert y_BND.shape == (B, 0, D) and loss == 0


def test_a_language_model_with_experts_adds_their_losses_and_learns() -> None:
    model = LanguageModel(20, width=16, depth=4, heads=2, feed_forward=32, experts={"experts": 4, "balance_loss": 0.1})
    kinds = [type(block.feed_forward).__name__ for block in model.stack.blocks]
    assert kinds == ["FeedForward", "SwitchFeedForward"] * 2
    inputs = torch.randint(20, (4, 12))
    found: list[Tensor] = []
    for block in list(model.stack.blocks)[1::2]:
        block.feed_forward.register_forward_hook(lambda module, given, output: found.append(output[1]))
    out = model(inputs)
    torch.testing.assert_close(out.auxiliary_loss, torch.stack(found).sum())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        out = model(inputs, targets=inputs.roll(-1, 1)) if model.scores_targets else model(inputs)
        loss = nn.functional.cross_entropy(out.outputs.flatten(0, 1), inputs.roll(-1, 1).flatten())
        (loss + out.auxiliary_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("memory", [None, "grc_stream", "memory_transformer", "rmt"])
def test_every_layer_may_have_experts_with_memories_of_all_kinds(memory: str | None) -> None:
    """Padding reaches the router, and memory tokens with weights of their own have experts of their own."""
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 32, "memory": memory}
    model = LanguageModel(20, **sizes, experts={"experts": 3, "every": 1})
    inputs = torch.randint(20, (2, 9))
    padding = torch.arange(9) >= torch.tensor([9, 5])[:, None]
    out = model(inputs, padding=padding)
    (out.outputs[~padding].square().mean() + out.auxiliary_loss).backward()
    switches = [module for module in model.modules() if isinstance(module, SwitchFeedForward)]
    own = [switch for switch in switches if switch.router_ED.grad is not None]
    assert len(own) >= 2
    if memory is None:
        assert all(int(switch.tallies()["dropped_tokens"][1]) == 14 for switch in switches)


def test_a_reversible_stack_has_the_losses_and_gradients_of_a_plain_graph() -> None:
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 32, "experts": 3}
    model = LanguageModel(20, **sizes, reversible=True)
    inputs = torch.randint(20, (2, 9))
    out = model(inputs)
    (out.outputs.square().mean() + out.auxiliary_loss).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    (switch,) = [module for module in model.modules() if isinstance(module, SwitchFeedForward)]
    assert int(switch.tallies()["dropped_tokens"][1]) == 18
    model.zero_grad()
    from cached_transformers.layers.reversible import _forward

    stack = model.stack
    x = model.embedding(inputs)
    state = stack.init_state(2, x)
    place = stack.clock_positions(state, 9)
    branches = [p for b, s in zip(stack.blocks, state.layers, strict=True) for p in b.sublayers(place, state=s)]  # type: ignore[operator]
    a, b, loss = _forward(branches, x)
    (model.head(stack.norm((a + b) / 2)).square().mean() + loss).backward()
    torch.testing.assert_close(grads, [p.grad for p in model.parameters() if p.grad is not None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 0}, "experts=0 must be at least 1"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0 must not be negative.* null"),
        ({"jitter": 1.0}, "jitter=1.0 must lie in"),
        ({"z_loss": -1e-3}, "z_loss=-0.001 must not be negative"),
        ({"activation": "rulu"}, "did you mean 'relu'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    refuses(words, made, **options)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"experts": 4, "capacity": 2}, "unknown option of experts 'capacity'; did you mean 'capacity_factor'"),
        ({"every": 2}, "must give their number"),
        ({"experts": 4, "every": 3}, "experts.every=3 must lie between 1 and the number of layers, depth=2"),
    ],
)
def test_experts_that_no_stack_can_have_are_refused(experts: Any, words: str) -> None:
    refuses(words, make_feed_forward, experts, D, F, index=0, depth=2)


def modeling() -> Any:
    library("transformers")
    return importlib.import_module("transformers.models.switch_transformers.modeling_switch_transformers")


def theirs(module: SwitchFeedForward, capacity: int) -> Any:
    """transformers' layer with the weights of ours."""
    config = library("transformers").SwitchTransformersConfig(
        d_model=D, d_ff=F, num_experts=E, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0
    )
    layer = modeling().SwitchTransformersSparseMLP(config)
    with torch.no_grad():
        layer.router.classifier.weight.copy_(module.router_ED)
        for expert in range(E):
            own = layer.experts[f"expert_{expert}"]
            own.wi.weight.copy_(module.enter_EDF[expert].T)
            own.wo.weight.copy_(module.leave_EFD[expert].T)
    return layer


@pytest.mark.parametrize("factor", [0.5, 1.0, None])
def test_transformers_layer_gives_the_same(factor: float | None) -> None:
    """One sequence a batch, as their capacity is one of each sequence; ours is of all tokens of the batch."""
    module = made(bias=False, capacity_factor=factor)
    length = 24
    capacity = length if factor is None else math.ceil(length * factor / E)
    layer = theirs(module, capacity)
    x_BND, again = tokens(rows=1, length=length).requires_grad_(), tokens(rows=1, length=length).requires_grad_()
    ours, expected = module(x_BND)[0], layer(again)
    torch.testing.assert_close(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x_BND.grad, again.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.router_ED.grad, layer.router.classifier.weight.grad, rtol=1e-4, atol=1e-5)
    enter = torch.stack([layer.experts[f"expert_{expert}"].wi.weight.grad.T for expert in range(E)])
    torch.testing.assert_close(module.enter_EDF.grad, enter, rtol=1e-4, atol=1e-5)
    assert factor is None or int(module.tallies()["dropped_tokens"][0]) > 0


def test_transformers_losses_are_the_same() -> None:
    """The balance loss of transformers is the mean of ours over rows; the z-loss is the same mean."""
    logits_BNE = torch.randn(B, N, E, generator=torch.Generator().manual_seed(3))
    p_BNE, chosen_BN = logits_BNE.softmax(-1), logits_BNE.argmax(-1)
    ours = torch.stack([balance_loss(p, chosen) for p, chosen in zip(p_BNE, chosen_BN, strict=True)]).mean()
    torch.testing.assert_close(ours, modeling().load_balancing_loss_func(p_BNE, chosen_BN))
    torch.testing.assert_close(z_loss(logits_BNE.flatten(0, 1)), modeling().router_z_loss_func(logits_BNE))
