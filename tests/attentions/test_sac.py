"""SAC against loops over single tokens, and its policy gradient against sums over all choices there are."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree
from common import refuses
from torch import Tensor

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers.attentions import SoftmaxAttention
from cached_transformers.attentions.sac import SAC, EdgePredictor, Edges, PolicyGradient, attend_edges

B, H, E, D = 2, 2, 5, 10


def make(**options: Any) -> SAC:
    torch.manual_seed(0)
    return SAC(D, H, **{"edges": 3, "hidden": 4, "clip": 2, **options}).double()


def inputs(tokens: int, rows: int = B) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q, k, v = (torch.randn(rows, H, tokens, size, dtype=torch.double, requires_grad=True) for size in (E, E, 3))
    return q, k, v, torch.randn(rows, tokens, D, dtype=torch.double)


def chosen(
    predictor: EdgePredictor,
    x_ND: Tensor,
    i: int,
    choice: int,
    count: int,
    causal: bool,
    given: list[int] | None = None,
) -> tuple[list[int], list[Tensor]]:
    """Edges of one token and their ln p: the most probable ones, or those given."""
    nodes, clip = predictor.nodes(x_ND), predictor.clip

    def distance(j: int) -> Tensor:
        return predictor.distance_LF[max(-clip, min(clip, j - i)) + clip]

    free = [j for j in range(len(x_ND)) if j != i and (j < i or not causal)]
    taken, told, state = [], [], None
    value = nodes[i] + predictor.source_CF[choice]
    for step in range(min(count, len(free))):
        state = predictor.cell(value[None], state)
        scores = torch.stack([state[0][0] @ (nodes[j] + distance(j)) for j in free]) / math.sqrt(nodes.shape[1])
        at = int(scores.argmax()) if given is None else free.index(given[step])
        told.append(scores.log_softmax(0)[at])
        taken.append(free.pop(at))
        value = nodes[taken[-1]] + distance(taken[-1])
    return taken, told


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_evaluation_is_softmax_over_the_most_probable_edges(tokens: int, causal: bool, per_head: bool) -> None:
    core = make(per_head=per_head).eval()
    q, k, v, x = inputs(tokens)
    for lengths in ([tokens, tokens], [tokens, max(1, tokens - 4)]):
        padding = torch.arange(tokens) >= torch.tensor(lengths)[:, None]
        mask = padding if padding.any() else None
        got = core(q, k, v, x_BND=x, causal=causal, key_padding_mask=mask).out_BHNV
        seen = torch.zeros(B, H, tokens, tokens, dtype=torch.bool)
        for b, h in itertools.product(range(B), range(H)):
            for i in range(lengths[b]):
                edges, _ = chosen(core.predictor, x[b, : lengths[b]], i, h if per_head else 0, 3, causal)
                seen[b, h, i, [i, *edges]] = True
        logits = (q @ k.mT / math.sqrt(E)).masked_fill(~seen, -torch.inf)
        want = torch.where(seen.any(-1, keepdim=True), logits.softmax(-1), 0) @ v
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        agree(got, want, (q, k, v), weight=~padding[:, None, :, None])


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_told_of_a_choice_is_its_log_probability(causal: bool) -> None:
    """Values, and gradients of all parameters, of edges that were drawn in two rows, one of them padded."""
    core = make(per_head=True)
    x, lengths = inputs(7)[3], (7, 4)
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    edges = core.predictor(x, 3, causal=causal, padding_BN=padding, draw=True, tell=True)
    assert edges.log_p_BCNA is not None
    told = []
    for b, h, i in itertools.product(range(B), range(H), range(7)):
        there = edges.there_BCNA[b, h, i]
        count = min(3, i if causal else lengths[b] - 1) if i < lengths[b] else 0
        assert there.tolist() == [True] * count + [False] * (3 - count)
        given = edges.index_BCNA[b, h, i][there].tolist()
        if count:
            told += chosen(core.predictor, x[b, : lengths[b]], i, h, count, causal, given)[1]
        told += [torch.zeros((), dtype=torch.double)] * (3 - count)
    want = torch.stack(told).view_as(edges.log_p_BCNA)
    agree(edges.log_p_BCNA, want, core.parameters())


def sequences(tokens: int, count: int) -> Tensor:
    """(S, 1, N, A): in entry s, each token makes its s-th choice without replacement of others than itself."""
    each = [list(itertools.permutations([j for j in range(tokens) if j != i], count)) for i in range(tokens)]
    return torch.tensor(each).transpose(0, 1)[:, None]


def test_the_probabilities_of_all_choices_add_up_to_one_and_draws_follow_them() -> None:
    core = make()
    x = inputs(4, rows=1)[3]
    for p in core.parameters():
        torch.nn.init.normal_(p)
    every = sequences(4, 2)
    given = core.predictor(x.expand(len(every), -1, -1), 2, given_BCNA=every, tell=True)
    p_SN = given.log_p_BCNA.sum(-1)[:, 0].exp()
    torch.testing.assert_close(p_SN.sum(0), torch.ones(4).double(), rtol=0, atol=1e-12)
    draws = 4000
    drawn = core.predictor(x.expand(draws, -1, -1), 2, draw=True, generator=torch.Generator().manual_seed(0))
    for i in range(4):
        hits = (drawn.index_BCNA[:, 0, None, i] == every[:, 0, i]).all(-1).double().mean(0)
        spread = (p_SN[:, i] * (1 - p_SN[:, i]) / draws).sqrt()
        assert ((hits - p_SN[:, i]).abs() < 4 * spread + 1e-9).all()
    again = core.predictor(x.expand(draws, -1, -1), 2, draw=True, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.index_BCNA, again.index_BCNA)


def test_the_policy_gradient_is_on_average_that_of_the_expected_reward() -> None:
    core, helper = make(), PolicyGradient().double().eval()
    helper.baseline.fill_(0.3)
    helper.calls.fill_(1)
    x = inputs(3, rows=1)[3]
    every = torch.stack([torch.stack(pick) for pick in itertools.product(*sequences(3, 1)[:, 0].transpose(0, 1))])[
        :, None
    ]
    log_p = core.predictor(x.expand(8, -1, -1), 1, given_BCNA=every, tell=True).log_p_BCNA.sum((1, 2, 3))
    reward = torch.randn(8, dtype=torch.double)
    parameters = list(core.parameters())
    want = torch.autograd.grad((log_p.exp() * reward).sum(), parameters, retain_graph=True)
    total = torch.zeros(())
    for s in range(8):
        core.log_p_B = log_p[s : s + 1]
        total = total - log_p[s].detach().exp() * helper(core, reward[s : s + 1])
    torch.testing.assert_close(torch.autograd.grad(total, parameters), want, rtol=0, atol=1e-12)
    assert helper.baseline == 0.3


def test_the_baseline_is_a_running_mean_and_each_choice_is_used_once() -> None:
    model, helper = torch.nn.ModuleList([make(), make()]), PolicyGradient(momentum=0.75)
    q, k, v, x = inputs(4)
    for core in model:
        core(q, k, v, x_BND=x)
    log_p = sum(core.log_p_B for core in model)
    reward = torch.tensor([1.0, 4.0])
    torch.testing.assert_close(helper(model, reward), -((reward - 2.5) * log_p).mean())
    assert helper.baseline == 2.5 and all(core.log_p_B is None for core in model)
    refuses("no SAC core drew edges", helper, model, reward)
    model[0](q, k, v, x_BND=x)
    refuses("give one a row", helper, model, reward[:1])
    log_p = model[0].log_p_B
    torch.testing.assert_close(helper(model, reward + 4), -((reward + 1.5) * log_p).mean())
    assert helper.baseline == 2.5 + 0.25 * 4


def test_the_policy_learns_where_the_reward_is() -> None:
    """Tokens are paid for looking at the one token that is marked."""
    core, helper = make(edges=1, hidden=8).float(), PolicyGradient()
    optimizer = torch.optim.Adam(core.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(150):
        x, marked = torch.randn(32, 6, D, generator=generator), torch.randint(6, (32, 1), generator=generator)
        x[torch.arange(32)[:, None], marked, 0] = 5.0
        q = torch.zeros(32, H, 6, E)
        # With values that tell the place, the output tells what was chosen: half of it is the token itself.
        v = torch.eye(6).expand(32, H, 6, 6)
        out = core(q, q, v, x_BND=x, generator=generator).out_BHNV[:, 0]
        paid = out.gather(-1, marked[:, None].expand(-1, 6, -1))[..., 0].sum(-1) * 2 - 1  # the marked token pays itself
        optimizer.zero_grad()
        helper(core, paid).backward()
        optimizer.step()
        found.append(paid.mean().item() / 5)
    assert sum(found[:5]) / 5 < 0.3 and sum(found[-5:]) / 5 > 0.95


def test_straight_through_changes_no_output_and_trains_an_edge_like_its_logit() -> None:
    core = make(learn="straight_through")
    q, k, v, x = inputs(6)
    out = core(q, k, v, x_BND=x).out_BHNV
    torch.testing.assert_close(out, copy.deepcopy(core).eval()(q, k, v, x_BND=x).out_BHNV, rtol=0, atol=1e-12)
    edges = core.predictor(x, 3, tell=True)
    plain, _ = attend_edges(q, k, v, edges, want_lse=True)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
    assert core.log_p_B is None
    weight = torch.randn_like(out)
    logits = torch.zeros_like(edges.log_p_BCNA, requires_grad=True)
    (slope,) = torch.autograd.grad((attend_edges(q, k, v, edges, added_BCNA=logits)[0] * weight).sum(), logits)
    parameters = list(core.parameters())
    want = torch.autograd.grad((edges.log_p_BCNA * slope).sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad((out * weight).sum(), parameters), want, rtol=0, atol=1e-10)


def test_given_edges_are_a_mask() -> None:
    """Also those of a window, which makes local attention."""
    q, k, v, _ = inputs(7)
    torch.manual_seed(2)
    index = torch.stack([torch.randperm(6)[:3] for _ in range(B * H * 7)]).view(B, H, 7, 3)
    index = index + (index >= torch.arange(7)[:, None])  # none leads to the token itself
    there = torch.rand(B, H, 7, 3) < 0.7
    before = torch.arange(7)[:, None] - torch.arange(1, 4)
    for edges in (Edges(index, there), Edges(*(t.expand(B, 1, -1, -1) for t in (before.clamp(min=0), before >= 0)))):
        mask = torch.eye(7, dtype=torch.bool).expand(B, H, 7, 7).clone()
        for b, h, i, a in itertools.product(range(B), range(H), range(7), range(3)):
            head = h % edges.index_BCNA.shape[1]
            if edges.there_BCNA[b, head, i, a]:
                mask[b, h, i, edges.index_BCNA[b, head, i, a]] = True
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out, lse = attend_edges(q, k, v, edges, want_lse=True)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
        logits = (q @ k.mT / math.sqrt(E)).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-10)
    near = torch.ones(7, 7, dtype=torch.bool).tril().triu(-3)
    assert torch.equal(mask, near.expand(B, H, 7, 7))


def test_it_is_exact_with_all_edges_and_can_be_copied_after_a_draw() -> None:
    core = make(edges=8).train()
    q, k, v, x = inputs(9)
    for causal in (False, True):
        want = SoftmaxAttention()(q, k, v, causal=causal).out_BHNV
        torch.testing.assert_close(core(q, k, v, x_BND=x, causal=causal).out_BHNV, want, rtol=0, atol=1e-10)
    core = make()
    q, k, v, x = inputs(5)
    core(q, k, v, x_BND=x)
    assert core.log_p_B is not None and copy.deepcopy(core).log_p_B is None
    refuses("x_BND", core, q, k, v)


@pytest.mark.parametrize("per_head", [False, True])
def test_what_it_costs(per_head: bool) -> None:
    tokens, width, edges, hidden, clip = 12, 3, 4, 6, 5
    core = SAC(D, H, edges=edges, hidden=hidden, clip=clip, per_head=per_head)
    q, k, v = torch.randn(B, H, tokens, E), torch.randn(B, H, tokens, E), torch.randn(B, H, tokens, width)
    x = torch.randn(B, tokens, D)
    products = H * tokens * (edges + 1) * (E + width) + tokens * D * hidden
    step = 8 * hidden**2 + hidden * (tokens + 2 * clip + 1)
    products += (H if per_head else 1) * tokens * edges * step
    for mode in ("eval", "train"):
        assert count_flops(core, q, k, v, x_BND=x, mode=mode) == 2 * B * products
