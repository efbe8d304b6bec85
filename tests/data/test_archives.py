"""Archives hold what folders hold, whatever their kind, and are indexed once; damaged texts, labels and tokenizers."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from common import refuses
from data.pictures import class_folders, encoded, write_files, write_tar, write_tar_xz, write_zip
from torch import nn

from cached_lab.data import BadFile, archives
from cached_lab.data.archives import Listing, Tar, identity, open_listing, plain_tar
from cached_lab.data.dataset import LabelledDataset
from cached_lab.data.store import entry_path
from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.text_files import find_texts
from cached_lab.data.tokenizers import ByteTokenizer, SpecialTokens, WordTokenizer, load_tokenizer
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.tasks.language.text_reader import read_tokenizer, text_pieces
from cached_lab.tasks.translation.lines import read_tokenizer as read_pair_file
from cached_lab.training.metrics import read_metrics

OPTIONS = {"image_size": 8, "validation_fraction": 0.25, "test_fraction": 0.25}


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path / "folder", class_folders())


@pytest.fixture(params=["tar", "tar.xz", "zip", "nested.tar"])
def archive(request, tmp_path):
    files = class_folders()
    if request.param == "nested.tar":  # the only file of its folder, with everything in one folder
        write_tar(tmp_path / "alone" / "nested.tar", {f"./top/{name}": content for name, content in files.items()})
        return tmp_path / "alone"
    write = {"tar": write_tar, "tar.xz": write_tar_xz, "zip": write_zip}[request.param]
    return write(tmp_path / f"made.{request.param}", files)


def test_an_archive_gives_the_items_of_its_folder(folder, archive):
    for split in ("train", "validation", "test"):
        ours, theirs = (ImageFolder(split, path=path, augment=False, **OPTIONS) for path in (archive, folder))
        assert len(ours) == len(theirs) and ours.class_names == theirs.class_names
        for index in range(len(ours)):
            assert torch.equal(ours[index][0], theirs[index][0]) and ours[index][1] == theirs[index][1]
            assert ours.file(index).parts[-2:] == theirs.file(index).parts[-2:]
            assert str(ours.file(index)).startswith(str(archive))


def test_an_index_is_made_once_and_again_when_the_archive_changes(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", {"x/0.png": b"abc"})
    index = Tar(path)
    assert (index.names, index.sizes.tolist()) == (["x/0.png"], [3])
    made = archives._index_arrays
    calls = []
    monkeypatch.setattr(archives, "_index_arrays", lambda p: calls.append(p) or made(p))
    assert Tar(path).names == ["x/0.png"] and not calls
    write_tar(path, {"x/0.png": b"abc", "y/1.png": b"defg"})
    assert Tar(path).names == ["x/0.png", "y/1.png"] and len(calls) == 1
    listing = Listing(path)
    assert [listing.read(name) for name in listing.names] == [b"abc", b"defg"]


def test_a_compressed_tar_is_unpacked_once_and_again_when_it_is_gone(tmp_path):
    path = write_tar_xz(tmp_path / "a.tar.xz", {"x": b"abc"})
    first = plain_tar(path)
    stamp = first.stat().st_mtime_ns
    assert plain_tar(path) == first and first.stat().st_mtime_ns == stamp
    assert [file.name for file in first.parent.glob(".*partial")] == []
    first.unlink()
    assert Listing(path).read("x") == b"abc"


def test_an_index_under_the_name_of_another_is_not_taken(tmp_path):
    paths = [write_tar(tmp_path / f"{name}.tar", {name: name.encode()}) for name in "ab"]
    places = []
    for path in paths:
        Tar(path)
        places.append(entry_path("tar-index", identity(path)))
    places[0].write_bytes(places[1].read_bytes())
    with pytest.warns(RuntimeWarning, match="its checksum differs"):
        assert Tar(paths[0]).names == ["a"]


def test_members_that_are_no_files_are_passed_over_and_absurd_sizes_end(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as made:
        info = tarfile.TarInfo("a.txt")
        info.size = 4
        made.addfile(info, io.BytesIO(b"text"))
        link = tarfile.TarInfo("a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        made.addfile(link)
    (text,) = find_texts(path)
    assert text.content() == b"text"
    content = bytearray(path.read_bytes())
    content[124:136] = b"\xff" * 11 + b"\x00"  # minus 256 bytes, which leads back to this very header
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    for read in (find_texts, Listing):
        refuses(r"a.tar.*-256", read, path)


def test_a_pipe_is_not_waited_for(folder, tmp_path):
    (folder / "class0" / "0.png").unlink()
    for name in ("folder/class0/0.png", "a.zip", "a.tar.gz"):
        os.mkfifo(tmp_path / name)
    refuses(r"0.png is a folder, pipe or device, no file", Listing(folder).read, "class0/0.png")
    for name in ("a.zip", "a.tar.gz"):
        refuses(name, Listing, tmp_path / name)


def test_a_part_of_a_listing_reads_by_its_own_names(folder, archive):
    for path in (folder, archive):
        listing = open_listing(path)
        part = listing.inside("class1")
        assert part.names == ["0.png", "1.png", "2.png", "3.png"] and part.root == listing.root / "class1"
        assert part.read("2.png") == listing.read("class1/2.png") and "2.png" in part and "class1/2.png" not in part
    (folder / ".hidden.png").write_bytes(b"x")
    listing = Listing(folder)
    assert ".hidden.png" in listing and "class9/0.png" not in listing


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_every_way_of_zip_to_compress_is_read_and_damage_is_noticed(tmp_path, method):
    path, content = tmp_path / "a.zip", bytes(range(256)) * 8
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr("x/a.bin", content)
        start = made.infolist()[0].header_offset + 30 + len("x/a.bin")
        middle = start + made.infolist()[0].compress_size // 2
    listing = Listing(path)
    assert listing.read("x/a.bin") == content
    damaged = bytearray(path.read_bytes())
    damaged[middle] ^= 0xFF
    path.write_bytes(bytes(damaged))
    refuses(r"a.zip.*x/a.bin", Listing(path).read, "x/a.bin")


def test_a_damaged_member_is_a_bad_file_as_any_other(tmp_path):
    path = write_zip(tmp_path / "a.zip", class_folders())
    with zipfile.ZipFile(path) as made:
        member = made.getinfo("class1/2.png")
    content = bytearray(path.read_bytes())
    content[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    data = ImageFolder("train", path=path, image_size=8, validation_fraction=0, test_fraction=0, bad_files="skip")
    with pytest.raises(BadFile, match=r"a.zip.*class1/2.png"):
        data[6]


def test_hidden_files_are_left_out(tmp_path):
    files = {"a/0.png": b"1", "a/._0.png": b"2", "__MACOSX/a/0.png": b"3", ".DS_Store": b"4"}
    assert Listing(write_tar(tmp_path / "a.tar", files)).names == ["a/0.png"]
    assert Listing(write_files(tmp_path / "a", files)).names == ["a/0.png"]


def test_tars_in_a_folder_open_as_folders(tmp_path):
    write_tar(tmp_path / "n01.tar", {"n01_1.JPEG": b"one"})
    write_files(tmp_path, {"n02/n02_1.JPEG": b"two"})
    listing = Listing(tmp_path, open_tars=True)
    assert listing.subfolders() == ["n01", "n02"]
    assert {name: listing.read(name) for name in listing.names} == {"n01/n01_1.JPEG": b"one", "n02/n02_1.JPEG": b"two"}


def test_damage_is_named(tmp_path):
    whole = write_tar(tmp_path / "a.tar", {"a/0.png": encoded(size=(40, 40))}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:2000])
    refuses(r"cut.tar", Listing, tmp_path / "cut.tar")
    packed_tar = write_tar_xz(tmp_path / "b.tar.xz", {"x": bytes(range(256)) * 40})
    packed_tar.write_bytes(packed_tar.read_bytes()[:-40])
    refuses(r"b.tar.xz", Listing, packed_tar)
    (tmp_path / "c.zip").write_bytes(b"PK nothing")
    refuses(r"c.zip", Listing, tmp_path / "c.zip")
    (tmp_path / "d.txt").write_text("text")
    refuses("neither a folder nor an archive", Listing, tmp_path / "d.txt")


def test_classes_without_an_image_stop_the_run_or_keep_their_place(folder):
    (folder / "class1a").mkdir()
    refuses("1 of its classes have no image: class1a; add images", ImageFolder, "train", path=folder, **OPTIONS)
    with pytest.warns(RuntimeWarning, match="1 of its classes have no image: class1a; they keep their places"):
        data = ImageFolder("train", path=folder, bad_files="skip", **OPTIONS)
    assert data.class_names == ["class0", "class1", "class1a", "class2"] and set(data.labels) == {0, 1, 3}


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_packed_text_is_named(tmp_path, suffix, damage):
    path = tmp_path / f"a.txt{suffix}"
    content = bytearray(PACK[suffix](b"some words in a line\n" * 500))
    if damage == "flipped":
        content[len(content) // 2] ^= 0x10
    path.write_bytes({"cut": content[:-20], "flipped": content, "foreign": b"no such archive"}[damage])
    with pytest.raises(ValueError, match=rf"a.txt{suffix} cannot be read: .*; the file is damaged, fetch it again"):
        create_dataset("text", "train", path=path)
    with pytest.raises(ValueError, match=rf"a.txt{suffix} cannot be read: .*; the file is damaged, fetch it again"):
        list(text_pieces(path, ByteTokenizer()))


@pytest.mark.parametrize(
    ("label", "why"),
    [(b"9" * 20, "too large|out of bounds"), (b"1e999", "invalid literal"), (b"4" * 9, "must lie in 0..999999")],
)
def test_a_label_that_is_none_is_named(tmp_path, label, why):
    with tarfile.open(tmp_path / "train.tar", "w") as made:
        for name, content in (("0.png", b"x"), ("0.cls", label), ("1.png", b"x"), ("1.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    refuses(rf"train.tar:0\.(cls|png).*{why}", create_dataset, "image_shards", "train", path=tmp_path, image_size=8)


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(ValueError, match=r"labels reach from 0 to 3, and must lie in 0\.\.2"):
        LabelledDataset("made", "train", np.array([0, 3, 1]), 3)


FOREIGN = {
    "empty": b"",
    "no object": b"[1, 2]",
    "no kind": b"{}",
    "another kind": b'{"kind": "other"}',
    "words that are numbers": b'{"kind": "word", "words": ["<unk>", "<eos>", 3], "punctuation": true}',
    "a word twice": b'{"kind": "word", "words": ["<unk>", "<eos>", "a", "a"], "punctuation": true}',
    "no model": b'{"kind": "bpe", "model": "{}"}',
    "half a pair": b'{"kind": "pair", "model": 1}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"kind": "\xff"}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_tokenizer_is_named(tmp_path, content):
    refuses(r"tokenizer.json", load_tokenizer, content, "RUN/tokenizer.json")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    refuses(r"tokenizer.json", read_pair_file, path)


def test_a_stream_is_of_a_language_model_and_its_own_tokenizer(tmp_path):
    path, model = tmp_path / "tokenizer.json", nn.Linear(1, 1)
    path.write_bytes(PairTokenizer.train(["a b"], 261, "raw").dump())
    refuses(r"is a run on pairs of texts.*cached translate", read_tokenizer, path, model)
    path.write_bytes(SpecialTokens(ByteTokenizer()).dump())
    refuses("is a run on pairs of texts", read_tokenizer, path, model)
    model.init_state, model.vocabulary = lambda rows: torch.zeros(rows), 3
    path.write_bytes(WordTokenizer(["<unk>", "<eos>", "a", "b"], False).dump())
    refuses("has 4 ids, the model 3: it is of another run", read_tokenizer, path, model)
    path.unlink()
    refuses("is not a run of a language model on text", read_tokenizer, path, model)


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": "x", "split": "train"}', "\udcff", "[" * 9000])
def test_a_foreign_line_of_the_metrics_is_named(tmp_path: Path, line: str):
    path, good = tmp_path / "metrics.jsonl", json.dumps({"step": 1, "split": "train"})
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8", errors="surrogateescape")
    refuses(r"metrics.jsonl", read_metrics, path)
