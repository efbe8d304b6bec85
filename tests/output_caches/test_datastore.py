"""The datastore of kNN-LM: search, files, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cached_lab.output_caches import Datastore, datastore

D, ENTRIES = 6, 500
ABOUT = {"fingerprint": "of this model", "key": "feed_forward", "dtype": "float32"}


def made(**options: Any) -> Datastore:
    return Datastore(torch.randn(ENTRIES, D), torch.randint(0, 9, (ENTRIES,)), ABOUT, **options)


def pieces(store: Datastore, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(store.keys_SD.split(size), store.values_S.split(size), strict=True)


def all_distances(store: Datastore, q_QD: Tensor) -> Tensor:
    return (q_QD[:, None].double() - store.keys_SD.double()).square().sum(-1)


@pytest.mark.parametrize("chunk", [2**27, 4 * D * 70, 4 * D])
@pytest.mark.parametrize("k", [1, 33])
def test_chunks_find_what_all_distances_say(k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, queries = made(), torch.randn(9, D)
    monkeypatch.setattr(datastore, "CHUNK", chunk)
    distances, places = store.nearest(queries, k)
    want = all_distances(store, queries).topk(k, largest=False)
    torch.testing.assert_close(distances.double(), want.values, rtol=1e-5, atol=1e-6)
    assert torch.equal(places, want.indices)


def test_distances_are_exact_far_from_the_origin() -> None:
    """Norms of 2,000 and distances of about 10: a difference of squares would be rounded to .5 in float32."""
    store = Datastore(torch.randn(ENTRIES, D) + 1000, torch.zeros(ENTRIES))
    queries = torch.randn(4, D) + 1000
    distances, places = store.nearest(queries, 20)
    exact = all_distances(store, queries).gather(1, places)
    torch.testing.assert_close(distances.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("search", ["Flat", "HNSW32", "IVF8,Flat", "IVF8,PQ2"])
def test_an_index_of_faiss_finds_them_and_distances_are_those_of_the_keys(search: str) -> None:
    pytest.importorskip("faiss")
    store, queries = made(search=search, probes=8), torch.randn(20, D)
    distances, places = store.nearest(queries, 10)
    every = all_distances(store, queries)
    torch.testing.assert_close(distances.double(), every.gather(1, places), rtol=1e-5, atol=1e-6)
    assert bool((distances.diff(dim=1) >= 0).all())
    near = every.topk(10, largest=False).indices
    share = float((places[..., None] == near[:, None]).any(-1).float().mean())
    assert share > (0.3 if "PQ" in search else 0.99), share


def test_a_cell_that_holds_too_few_leaves_places_empty() -> None:
    pytest.importorskip("faiss")
    store = made(search="IVF50,Flat", probes=1)
    distances, places = store.nearest(torch.randn(5, D), 100)
    assert places.shape == (5, 100) and bool((places[:, -1] == -1).all())
    assert torch.equal(distances.isinf(), places == -1)


def test_faiss_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"cached-transformers\[memory\]"):
        made(search="Flat")


def test_an_index_that_these_keys_do_not_make_is_refused() -> None:
    pytest.importorskip("faiss")
    with pytest.raises(ValueError, match=r"search='IVF8,PQ4'.*500"):
        made(search="IVF8,PQ4").nearest(torch.randn(1, D), 1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_built_is_loaded(tmp_path: Path, dtype: str) -> None:
    store, about = made(), {**ABOUT, "dtype": dtype}
    datastore.build(tmp_path / "store", pieces(store), about)
    found = datastore.load(tmp_path / "store", about)
    assert torch.equal(found.keys_SD, store.keys_SD.to(getattr(torch, dtype))) and found.about == about
    assert torch.equal(found.values_S, store.values_S.int()) and len(found) == ENTRIES
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["datastore.json", "keys.bin", "values.bin"]
    queries = torch.randn(3, D)
    rounded = Datastore(store.keys_SD.to(getattr(torch, dtype)), store.values_S)
    assert torch.equal(found.nearest(queries, 5)[0], rounded.nearest(queries, 5)[0])


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.zeros(3, D), torch.zeros(3)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        datastore.build(tmp_path / "store", broken(), ABOUT)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="holds no token"):
        datastore.build(tmp_path / "store", [], ABOUT)
    large = [(torch.full((1, D), 70000.0), torch.zeros(1))]
    with pytest.raises(ValueError, match="dtype='float32'"):
        datastore.build(tmp_path / "store", large, {**ABOUT, "dtype": "float16"})
    assert list(tmp_path.iterdir()) == []
    datastore.build(tmp_path / "store", large, ABOUT)
    with pytest.raises(ValueError, match="exists; name another folder"):
        datastore.build(tmp_path / "store", large, ABOUT)


def test_what_a_killed_build_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".store.partial").mkdir()
    (tmp_path / ".store.partial" / "keys.bin").write_bytes(b"half")
    datastore.build(tmp_path / "store", pieces(made()), ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_store_of_another_model_is_refused(tmp_path: Path) -> None:
    datastore.build(tmp_path / "store", pieces(made()), ABOUT)
    with pytest.raises(ValueError, match=r"fingerprint='of this model'.*'other'"):
        datastore.load(tmp_path / "store", {**ABOUT, "fingerprint": "other"})


@pytest.mark.parametrize("damage", ["flip", "cut", "value", "head", "missing", "newer"])
def test_a_damaged_store_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "store"
    datastore.build(folder, pieces(made()), ABOUT)
    keys, values, head = (folder / name for name in ("keys.bin", "values.bin", "datastore.json"))
    if damage in ("flip", "value"):
        path = keys if damage == "flip" else values
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        keys.write_bytes(keys.read_bytes()[:-4])
    elif damage == "head":
        head.write_text("[1]")
    elif damage == "missing":
        values.unlink()
    else:
        head.write_text(json.dumps({**json.loads(head.read_text()), "format": 2}))
    with pytest.raises(ValueError, match=f"{folder} is not a complete datastore: .*remove the folder"):
        datastore.load(folder, ABOUT)
