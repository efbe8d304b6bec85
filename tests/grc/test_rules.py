"""Rules of a shared cache: when it is written and when not, what leaves it alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grc.small_vit import cached_layer, equal, gradients, images, kinds, settled, small_vit, step, stored
from torch import Tensor, func

from cached_transformers import hold_caches, reset_caches, shuffle_caches


def not_reentrant(model: Any) -> Any:
    model.set_activation_checkpointing(True)
    return model


def compiled_blocks(model: Any) -> Any:
    for block in model.stack.blocks:
        block.compile(backend="aot_eager")
    return not_reentrant(model)


def compiled_whole(model: Any) -> Any:
    return torch.compile(not_reentrant(model), backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("recompute", [compiled_blocks, compiled_whole])
@kinds
def test_recomputation_changes_neither_gradients_nor_caches(
    recompute: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    depth = 1 if recompute is compiled_whole else 2  # a second layer takes the compiler as long again
    plain, model = small_vit(depth=depth, **options), small_vit(depth=depth, **options)
    parameters = list(model.parameters())
    names = [name for name, _ in plain.named_parameters()]
    run = recompute(model)
    for index in range(3):
        wanted = step(plain, images(index))
        run(images(index)).outputs.square().mean().backward()
        for name, parameter, grad in zip(names, parameters, wanted, strict=True):
            got = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            torch.testing.assert_close(got, grad, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
            parameter.grad = None
            parameter.data -= 0.1 * grad
        for a, b in zip(settled(model), settled(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@kinds
def test_a_plain_training_loop_commits_once_a_step(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for index in range(4):
        proposed = settled(model)
        model(images(index)).outputs.square().mean().backward()
        assert equal(stored(model), proposed)  # the last step's proposal, once, and not yet this step's
        optimizer.step()
        optimizer.zero_grad()
        assert equal(stored(model), proposed)
        assert not equal(settled(model), proposed)


@kinds
def test_evaluation_writes_nothing(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    model(images(0))
    proposed = settled(model)
    model.eval()
    assert equal(stored(model), proposed)  # eval() committed what was pending
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(images(1))
    assert equal(stored(model), proposed) and equal(settled(model), proposed)
    model.train()
    model(images(2))
    assert equal(stored(model), proposed) and not equal(settled(model), proposed)


@kinds
@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_two_batches_are_the_sum_and_each_is_an_update(options: dict[str, Any], together: bool) -> None:
    """One backward for both: the second forward overwrites the buffer that the first one's graph was made from."""
    model, twin, losses = small_vit(**options), small_vit(**options), []
    model(images(9)), twin(images(9))  # a cache that is not empty
    for index in range(2):
        losses.append(model(images(index)).outputs.square().mean())
        if not together:
            losses.pop().backward()
    if together:
        sum(losses).backward()
    pairs = zip(*(step(twin, images(index), rate=0) for index in range(2)), strict=True)
    for got, (a, b) in zip(gradients(model), pairs, strict=True):
        torch.testing.assert_close(got, a + b, rtol=0, atol=1e-6)
    assert equal(settled(model), settled(twin))
    assert not equal(settled(model), stored(model))


@kinds
def test_held_caches_take_no_proposals(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    model(images(0))
    proposed = settled(model)
    with hold_caches(model):
        assert equal(stored(model), proposed)  # what was pending counts
        first = model(images(1)).outputs
        with hold_caches(model):
            assert torch.equal(model(images(1)).outputs, first)  # the same cache, again
        assert torch.equal(model(images(1)).outputs, first)  # leaving the inner one does not release the outer
    assert equal(settled(model), proposed)
    assert torch.equal(model(images(1)).outputs, first)
    assert not equal(settled(model), proposed)


def test_held_caches_are_released_after_an_error() -> None:
    model = small_vit()
    with pytest.raises(ValueError, match="images of shape"), hold_caches(model):
        model(torch.randn(1, 1, 4, 4))
    model(images(0))
    assert not equal(settled(model), stored(model))


@kinds
def test_two_views_under_checkpointing_share_one_backward_when_held(options: dict[str, Any]) -> None:
    plain, model = small_vit(**options), not_reentrant(small_vit(**options))
    for m in (plain, model):
        m(images(0)).outputs.sum().backward()
        m.zero_grad()
        with hold_caches(m):
            (m(images(1)).outputs.square().mean() + m(images(2)).outputs.square().mean()).backward()
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@kinds
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_a_batch_that_is_not_finite_leaves_the_cache(options: dict[str, Any], poison: float) -> None:
    model, twin = small_vit(**options), small_vit(**options)
    for m in (model, twin):
        m(images(0))
    bad = images(1)
    bad[2, 0, 3, 3] = poison
    assert not model(bad).outputs.isfinite().all()
    assert equal(settled(model), settled(twin))
    torch.testing.assert_close(step(model, images(2)), step(twin, images(2)), rtol=0, atol=0)
    assert equal(settled(model), settled(twin))
    assert all(cache.isfinite().all() for cache in settled(model))


class Sequences:
    """Rows of tokens; one row is all padding."""

    def __init__(self, **grc: Any) -> None:
        torch.manual_seed(0)
        self.layer = cached_layer(16, 2, 4, **grc)
        self.x_BND = torch.randn(3, 6, 16)
        self.padding_BN = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]).bool()


ATTENTION: dict[str, Any] = {"name": "attention_cache"}
NO_MAP: dict[str, Any] = {"variant": "released", "positional_convolution": False}


@pytest.mark.parametrize(
    "options",
    [{}, {"attend": "sample"}, NO_MAP, ATTENTION, {**ATTENTION, "attend": "sample"}, {**ATTENTION, "update": "store"}],
)
def test_rows_of_padding_alone_leave_the_mean(options: dict[str, Any]) -> None:
    given, without = Sequences(**options), Sequences(**options)
    kept = [0, 2]
    for _ in range(2):
        y_BND = given.layer(given.x_BND, padding_BN=given.padding_BN).y_BND
        expected = without.layer(without.x_BND[kept], padding_BN=without.padding_BN[kept]).y_BND
        valid = ~given.padding_BN[kept]
        torch.testing.assert_close(y_BND[kept][valid], expected[valid], rtol=0, atol=1e-6)
        for a, b in zip(settled(given.layer), settled(without.layer), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    y_BND[kept][valid].square().sum().backward()
    expected[valid].square().sum().backward()
    for (name, a), b in zip(given.layer.named_parameters(), without.layer.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["grc", "attention_cache"])
@pytest.mark.parametrize("attend", ["mean", "sample"])
def test_a_batch_of_padding_alone_changes_nothing(attend: str, name: str) -> None:
    given = Sequences(attend=attend, name=name)
    given.layer(given.x_BND, padding_BN=given.padding_BN)
    before = settled(given.layer)
    given.layer(given.x_BND, padding_BN=torch.ones_like(given.padding_BN))
    assert equal(settled(given.layer), before)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_every_digit_of_the_cache(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = small_vit(**options)
    model(images(0))
    model(images(1))
    now, next_ = stored(model), settled(model)
    model.to(dtype)
    assert all(cache.dtype == torch.float32 for cache in stored(model))
    assert equal(stored(model), now) and equal(settled(model), next_)
    out = model(images(2).to(dtype)).outputs
    assert out.dtype == dtype and equal(stored(model), next_)
    out.float().square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == dtype for p in model.parameters())
    fresh = settled(model)
    assert all(c.dtype == torch.float32 and c.isfinite().all() for c in fresh)
    # The lerp is made in float32: the new cache has digits that the half type does not have.
    assert any(not torch.equal(c, c.to(dtype).float()) for c in fresh)


@kinds
def test_reset_empties_and_forgets_the_proposal(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    model(images(0)), model(images(1))
    reset_caches(model)
    empty = [torch.zeros_like(cache) for cache in stored(model)]
    assert equal(stored(model), empty) and equal(settled(model), empty)
    assert torch.equal(model(images(2)).outputs, small_vit(**options)(images(2)).outputs)


def test_shuffle_keeps_the_values_and_moves_them() -> None:
    model = small_vit()
    model(images(0))
    before = settled(model)
    shuffle_caches(model, torch.Generator().manual_seed(3))
    after = stored(model)
    assert equal([c.flatten().sort().values for c in after], [c.flatten().sort().values for c in before])
    assert all((a != b).float().mean() > 0.8 for a, b in zip(after, before, strict=True))
    twin = small_vit()
    twin(images(0))
    shuffle_caches(twin, torch.Generator().manual_seed(3))
    assert equal(stored(twin), after)
    assert equal(settled(model), after)  # nothing pending undoes it


@kinds
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("mode", ["held", "eval"])
def test_gradients_per_sample_are_those_of_batches_of_one(options: dict[str, Any], mode: str) -> None:
    model, x_BCHW = small_vit(**options), images(3)
    step(model, images(0)), step(model, images(1))

    def loss(params: dict[str, Tensor], image_CHW: Tensor) -> Tensor:
        return func.functional_call(model, params, (image_CHW[None],)).outputs.square().mean()

    params = {name: p.detach() for name, p in model.named_parameters()}
    per_sample = func.vmap(func.grad(loss), in_dims=(None, 0))
    for call in (lambda: per_sample(params, x_BCHW), lambda: func.grad(loss)(params, x_BCHW[0])):
        with pytest.raises(ValueError, match=r"training=True.*eval\(\).*hold_caches"):
            call()
    before = settled(model)
    with hold_caches(model.train(mode == "held")):
        found = per_sample(params, x_BCHW)
        for row, image_CHW in enumerate(x_BCHW):
            for (name, _), wanted in zip(model.named_parameters(), step(model, image_CHW[None], rate=0), strict=True):
                torch.testing.assert_close(found[name][row], wanted, rtol=1e-5, atol=1e-6)
    assert equal(settled(model), before)
