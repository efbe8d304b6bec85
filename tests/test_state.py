"""State trees: the operations on rows, and files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from common import refuses
from torch import Tensor

from cached_transformers import state as states


class Leafy(NamedTuple):
    slots_BMD: Tensor
    count_B: Tensor


class Tree(NamedTuple):
    clock_B: Tensor
    layers: Any
    nothing: Any


def tree(rows: int = 3) -> Tree:
    def leafy() -> Leafy:
        return Leafy(torch.randn(rows, 4, 2), torch.arange(rows))

    return Tree(torch.arange(rows), (leafy(), leafy()), ())


def tensors(state: states.State) -> list[Tensor]:
    return [t for _, t in states.named_tensors(state)]


def same(a: states.State, b: states.State) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_names_and_types_are_those_of_the_tree() -> None:
    names = [name for name, _ in states.named_tensors(tree())]
    assert names == ["clock_B", *(f"layers.{i}.{field}" for i in (0, 1) for field in ("slots_BMD", "count_B"))]
    assert [name for name, _ in states.named_tensors(torch.zeros(2))] == ["state"]
    doubled = states.map_state(lambda t: t * 2, tree())
    assert isinstance(doubled, Tree) and isinstance(doubled.layers, tuple) and isinstance(doubled.layers[1], Leafy)
    assert doubled.nothing == () and doubled.clock_B.tolist() == [0, 2, 4]
    refuses("state=tuple of 1", states.map_state, torch.add, tree(), tree()._replace(layers=(tree().layers[0],)))


def test_reset_takes_rows_in_their_dtype_and_detach_cuts() -> None:
    old, fresh = tree(), tree()
    old.layers[0].slots_BMD[1] = torch.nan
    result = states.reset(old, fresh, torch.tensor([False, True, False]))
    for got, before, new in zip(tensors(result), tensors(old), tensors(fresh), strict=True):
        assert torch.equal(got[1], new[1])
        assert torch.equal(got[::2], before[::2])
    old = states.map_state(lambda t: t.double() if t.is_floating_point() else t, tree())
    assert states.signature(states.reset(old, tree(), torch.tensor([True, False, True]))) == states.signature(old)
    weight = torch.ones(2, requires_grad=True)
    assert not any(t.requires_grad for t in tensors(states.detach((weight * 2, weight + 1))))


@pytest.mark.parametrize("index", [[2, 1, 0], [0, 0, 2], [1]])
def test_reorder_and_repeat_are_row_indexing(index: list[int]) -> None:
    state = tree()
    same(states.reorder(state, torch.tensor(index)), states.map_state(lambda t: t[index], state))
    same(states.repeat(state, 2), states.map_state(lambda t: t[[0, 0, 1, 1, 2, 2]], state))


def test_seal_copies_into_the_canonical_layout_and_keeps_the_graph() -> None:
    long = torch.randn(3, 10, 2, requires_grad=True)
    (sealed,) = states.seal((long[:, 2:6],))
    assert sealed.is_contiguous() and sealed.stride() == (8, 2, 1) and torch.equal(sealed, long[:, 2:6])
    expanded = torch.randn(1, 4).expand(3, -1)
    assert states.seal(expanded).stride() == (4, 1)
    sealed.sum().backward()
    assert long.grad is not None and long.grad[:, 2:6].eq(1).all()
    state = tree()
    for a, b in zip(tensors(states.seal(state)), tensors(state), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_sizes() -> None:
    state = tree()
    assert states.nbytes(state) == 3 * 8 + 2 * (3 * 4 * 2 * 4 + 3 * 8)
    assert states.signature(state)[1] == ("layers.0.slots_BMD", (3, 4, 2), torch.float32)
    text = states.summary(state)
    assert "layers.1.count_B" in text and text.endswith(f"{states.nbytes(state)} bytes")
    assert len(text.splitlines()) == 6
    assert states.signature(states.to(state, "meta")) == states.signature(state)
    assert all(t.device.type == "meta" for t in tensors(states.to(state, "meta")))


def test_a_file_round_trip_is_bitwise(tmp_path: Path) -> None:
    state = tree()
    state.layers[0].slots_BMD[0, 0, 0] = torch.nan
    states.save(state, tmp_path / "state.safetensors")
    loaded = states.load(tmp_path / "state.safetensors", tree())
    assert isinstance(loaded.layers[0], Leafy)
    same(*(states.map_state(lambda t: t.view(torch.uint8), s) for s in (loaded, state)))


def test_states_with_views_and_gradients_can_be_saved(tmp_path: Path) -> None:
    base = torch.randn(3, 8, requires_grad=True)
    state = (base[:, :4], base[:, 4:], base.detach())
    states.save(state, tmp_path / "s")
    for a, b in zip(states.load(tmp_path / "s", states.seal(state)), state, strict=True):
        assert torch.equal(a, b) and not a.requires_grad


def other_rows(state: Tree) -> Tree:
    return state._replace(layers=(state.layers[0], tree(5).layers[0]))


def other_dtype(state: Tree) -> Tree:
    return state._replace(
        layers=(state.layers[0], state.layers[1]._replace(slots_BMD=state.layers[1].slots_BMD.half()))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(layers=s.layers[:1]), r"another model.*: layers\.1\.count_B, layers\.1\.slots_BMD"),
        (lambda s: s._replace(nothing=s.clock_B), r"another model.*one only: nothing"),
        (other_rows, r"layers\.1\.slots_BMD is \(3, 4, 2\) torch\.float32.*expects \(5, 4, 2\)"),
        (other_dtype, r"layers\.1\.slots_BMD is \(3, 4, 2\) torch\.float32.*expects \(3, 4, 2\) torch\.float16"),
    ],
)
def test_a_file_of_another_structure_is_refused(tmp_path: Path, change: Callable[[Tree], Tree], message: str) -> None:
    path = tmp_path / "state.safetensors"
    states.save(tree(), path)
    with pytest.raises(ValueError, match=message) as caught:
        states.load(path, change(tree()))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", None])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state.safetensors"
    states.save(tree(), path)
    path.write_bytes(path.read_bytes()[:-7] if content is None else content)
    with pytest.raises(ValueError, match="is no whole state file") as caught:
        states.load(path, tree())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "state.safetensors"
    first = tree()
    states.save(first, path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, function, fail)
    refuses("No space", states.save, tree(), path, raises=OSError)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    same(states.load(path, tree()), first)


def small() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    rows = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return rows, (torch.tensor([[7], [8]]), torch.tensor([[True], [False]]))


def test_a_flipped_bit_anywhere_in_the_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    states.save(small(), path)
    content = path.read_bytes()
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        refuses(r"is no whole state file.*; begin the stream anew", states.load, path, small())


def test_a_file_of_the_first_format_is_read(tmp_path: Path) -> None:
    stored = states.load(Path(__file__).parent / "fixtures" / "state_format_1.safetensors", small())
    same(stored, small())


def test_a_newer_format_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    states.save(small(), path)
    path.write_bytes(path.read_bytes().replace(b'state":"3 ', b'state":"4 '))
    refuses("has format 4, and this version reads up to 3; use the matching version", states.load, path, small())
    named = dict(states.named_tensors(small()))
    path.write_bytes(safetensors.torch.save(named, {"format": "pt"}))
    refuses("written by something else", states.load, path, small())


@pytest.mark.parametrize(("dtype", "near"), [("float16", 5e-4), ("bfloat16", 4e-3), ("int8", 1e-2)])
def test_a_packed_file_is_smaller_and_says_what_it_costs(dtype: Any, near: float, tmp_path: Path) -> None:
    state = Tree(torch.tensor([3, 4]), (torch.randn(2, 50, 64), torch.randn(2, 3) > 0), torch.zeros(2, 5))
    whole = states.save(state, tmp_path / "whole")
    small = states.save(state, tmp_path / "small", dtype=dtype)
    assert whole.error == 0 and whole.nbytes == (tmp_path / "whole").stat().st_size
    assert small.nbytes < (0.35 if dtype == "int8" else 0.6) * whole.nbytes
    found = states.load(tmp_path / "small", state)
    assert states.signature(found) == states.signature(state)
    assert torch.equal(found.clock_B, state.clock_B) and torch.equal(found.layers[1], state.layers[1])
    assert torch.equal(found.nothing, state.nothing)
    off = (found.layers[0] - state.layers[0]).norm() / state.layers[0].norm()
    assert 0 < small.error < near and off.item() == pytest.approx(small.error, rel=1e-3)


def test_int8_is_a_scale_for_each_vector(tmp_path: Path) -> None:
    x = torch.tensor([[[127.0, -63.5, 1.0], [0.127, 0.0, -0.001]]])
    states.save(x, tmp_path / "x", dtype="int8")
    torch.testing.assert_close(
        states.load(tmp_path / "x", x), torch.tensor([[[127.0, -64.0, 1.0], [0.127, 0.0, -0.001]]])
    )


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1.0, "int4", r"dtype='int4' is no way to keep a state; take float16, bfloat16, int8, or None"),
        (1e6, "float16", r"state holds 1e\+06, too large for dtype='float16'; take 'bfloat16'"),
        (float("nan"), "int8", "not finite"),
    ],
)
def test_what_cannot_be_packed_is_refused(value: float, dtype: Any, message: str, tmp_path: Path) -> None:
    refuses(message, states.save, torch.full((1, 2), value), tmp_path / "x", dtype=dtype)
    assert not (tmp_path / "x").exists()


def test_a_state_is_that_of_its_weights(tmp_path: Path) -> None:
    model, state = torch.nn.BatchNorm1d(3), torch.randn(2, 3)
    states.save(state, tmp_path / "a", model=model)
    for _ in range(8):  # equal states are equal files
        states.save(state, tmp_path / "again", model=model)
        assert (tmp_path / "again").read_bytes() == (tmp_path / "a").read_bytes()
    states.save(state, tmp_path / "b")
    assert torch.equal(states.load(tmp_path / "a", state, model=model), state)
    assert torch.equal(states.load(tmp_path / "a", state), state)
    refuses("b does not tell the weights that made it", states.load, tmp_path / "b", state, model=model)
    for change in (model.weight, model.running_mean):
        before = change.detach().clone()
        with torch.no_grad():
            change[1] += 1e-6
        refuses("BatchNorm1d", states.load, tmp_path / "a", state, model=model)
        with torch.no_grad():
            change.copy_(before)
    states.load(tmp_path / "a", state, model=torch.nn.DataParallel(model))  # wrapped, it is the same
    refuses("bias is offloaded", states.fingerprint, torch.nn.Linear(2, 2, device="meta"))
