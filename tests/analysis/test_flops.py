"""Counts against counts made by hand; measuring must leave no trace in the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_lab.experiments.costs.flops import count_flops, count_parameters, saved_activation_bytes

B, N, D, H, M = 2, 5, 16, 4, 3


class Block(nn.Module):
    """Fused self-attention, a second attention over M cached slots, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.feed_forward = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(0.5), nn.Linear(4 * D, D))
        self.register_buffer("cache_MD", torch.zeros(M, D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.pending: Tensor | None = torch.ones(M, D)
        self.history: list[int] = []

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], H, D // H).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.pending is not None:  # the worst case for a measurement: state changes with every forward
            self.cache_MD.copy_(self.pending)
            self.pending = None
        self.calls += 1
        self.history.append(x.shape[1])
        q, k, v = (self.heads(t) for t in self.qkv(x).chunk(3, -1))
        cache = self.heads(self.cache_MD.expand(x.shape[0], M, D))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y + F.scaled_dot_product_attention(q, cache, cache)
        return self.feed_forward(self.out(y.transpose(1, 2).flatten(2)))


ATTENTION = 2 * 2 * B * N * (N + M) * D  # two products, two operations each, over the sequence and the cache
QKV, OUT, FEED_FORWARD = 2 * B * N * D * 3 * D, 2 * B * N * D * D, 2 * 2 * B * N * D * 4 * D
BLOCK = QKV + ATTENTION + OUT + FEED_FORWARD


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_block_by_hand(mode: str) -> None:
    assert count_flops(Block(), torch.randn(B, N, D), mode=mode) == BLOCK


def test_products_in_place_convolutions_and_fused_layers_count() -> None:
    class Sums(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.zeros(2, 4).addmm_(a, b) + torch.zeros(1, 2, 4).baddbmm_(a[None], b[None])

    assert count_flops(Sums(), torch.randn(2, 3), torch.randn(3, 4)) == 2 * (2 * 2 * 3 * 4)
    layer = nn.TransformerEncoderLayer(D, H, 4 * D, batch_first=True)
    assert count_flops(layer, torch.randn(B, N, D)) == QKV + OUT + FEED_FORWARD + 2 * 2 * B * N * N * D
    assert count_flops(nn.LSTM(D, 8), torch.randn(N, B, D)) == 2 * N * B * 4 * 8 * (D + 8)
    x = torch.randn(B, 4, 6, 6)
    assert count_flops(nn.Conv2d(4, 8, 3, padding=1), x) == 2 * B * 36 * 8 * 4 * 9
    assert count_flops(nn.Conv2d(4, 4, 3, padding=1, groups=4), x) == 2 * B * 36 * 4 * 9


def test_cost_grows_with_the_batch_and_keywords_arrive() -> None:
    class Keyword(nn.Module):
        def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
            return x @ x.mT @ x if twice else x @ x.mT

    model, x = Keyword(), torch.randn(B, N, D)
    assert count_flops(model, x) == 2 * B * N * N * D
    assert count_flops(model, x, twice=True) == 2 * count_flops(model, x)
    assert count_flops(model, x.repeat(3, 1, 1)) == 3 * count_flops(model, x)


def test_by_shapes_only() -> None:
    """Counts of a batch that no machine could run, and no trace of it; not in evaluation, which works on the model."""
    model, x = Block(), torch.randn(B, N, D)
    assert count_flops(model, x, mode="train", shapes_only=True) == BLOCK
    assert model.history == [] and model.calls == 0
    big = torch.zeros(1, 1, 1).expand(10**6, 50, D)
    model = nn.Sequential(nn.Linear(D, 100 * D), nn.Linear(100 * D, D))
    assert count_flops(model, big, mode="train", shapes_only=True) == 2 * 2 * 10**6 * 50 * 100 * D * D
    refuses(r'shapes_only=True.*mode="train"', count_flops, model, x, shapes_only=True)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace(mode: str, training: bool) -> None:
    model = Block().train(training)
    model.out.eval()  # a layer frozen on purpose
    pending = model.pending
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    rng = torch.get_rng_state()
    count_flops(model, torch.zeros(B, N, D), mode=mode)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.pending is pending and model.history == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_an_unknown_mode_and_an_error_leave_no_trace() -> None:
    model = Block().train()
    with pytest.raises(RuntimeError):
        count_flops(model, torch.zeros(B, N, D + 1))
    assert model.training and model.calls == 0 and model.pending is not None
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.mkldnn.is_available()
    refuses("mode='fast'", count_flops, Block(), torch.randn(B, N, D), mode="fast")


def test_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    assert count_parameters(model) == 16 + 12 + 6  # running statistics are buffers
    model[0].requires_grad_(False)
    model.append(model[1])
    assert count_parameters(model) == 34


def test_saved_bytes_by_hand() -> None:
    linear, x = nn.Linear(D, D), torch.randn(B, N, D)

    def relu() -> Tensor:
        return linear(x).relu()

    # relu keeps its result; the linear layer keeps its input (excluded) and its weight (a parameter).
    assert saved_activation_bytes(relu, linear, x) == B * N * D * 4
    assert saved_activation_bytes(relu, linear) == 2 * B * N * D * 4
    assert saved_activation_bytes(relu, linear, x) == saved_activation_bytes(lambda: [relu()], linear, x)


def test_saved_bytes_of_graphs_that_died_shared_storage_and_checkpoints() -> None:
    x = torch.randn(100, requires_grad=True)
    y = x.detach().clone()
    assert saved_activation_bytes(lambda: (x * y) * y, x) == 400 + 0
    assert saved_activation_bytes(lambda: x[:10] * y[:10], x) == 400
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(D, D), nn.Tanh())])
    x = torch.randn(B, N, D, requires_grad=True)
    plain = saved_activation_bytes(lambda: model(x), model, x)
    checkpointed = saved_activation_bytes(lambda: checkpoint(model, x, use_reentrant=False), model, x)
    assert plain == 4 * B * N * D * 4 and checkpointed == 0
    x = torch.randn(100, requires_grad=True)

    def fn() -> Tensor:
        x.exp().sum()  # its graph is gone on return
        return x.sum()

    assert saved_activation_bytes(fn, x) == 0
    assert saved_activation_bytes(lambda: x.exp().sum(), x) == 400
