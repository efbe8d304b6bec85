"""Ways to damage a file: its bytes, its numbers, the values in its JSON, the headers of an archive, the file itself.

Everything follows from the generator that is given, so that a damage can be made again from its name.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

PACKERS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, lambda content: gzip.compress(content, mtime=0)),
    ".tgz": (gzip.decompress, lambda content: gzip.compress(content, mtime=0)),
    ".xz": (lzma.decompress, lzma.compress),
    ".bz2": (bz2.decompress, bz2.compress),
}
NUMBERS = ("-1", "0", "1.5", "1e308", "1e999", "NaN", "-Infinity", "2147483648", "18446744073709551616", "9" * 60, "7e")
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1.5, -2.5, 1e308, float("inf"), float("nan"), 2**31, 2**40, 2**64, 10**40, "", "x",
    "1", "\0", "\ud800", [], [1], [[1, 2], [3]], [None], {}, {"size": [8, 8], "counts": "zz"}, {"id": 1},
)  # fmt: skip


def damaged(content: bytes, suffix: str, random: Random) -> bytes:
    """The content of a file, damaged in one way; of a packed one sometimes inside, and packed again."""
    if suffix in PACKERS and random.random() < 0.5:
        unpack, pack = PACKERS[suffix]
        try:
            return pack(damaged(unpack(content), ".tar" if suffix == ".tgz" else "", random))
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error):  # it was damaged before
            return flipped(content, random)
    ways: list[Callable[[bytes, Random], bytes]] = [
        flipped, flipped, cut, emptied, extended, zeroed, overwritten, renumbered, recoded, shuffled_lines, foreign,
    ]  # fmt: skip
    if suffix == ".json":
        ways = [*ways[:5], *[rewritten_json] * 24]
    if suffix == ".tar":
        ways += [rewritten_tar] * 8
    return random.choice(ways)(content, random)


def flipped(content: bytes, random: Random) -> bytes:
    """One to four bits turned round."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)) if changed else ():
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def one_bit(content: bytes, random: Random) -> bytes:
    """One bit turned round."""
    changed = bytearray(content)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut(content: bytes, random: Random) -> bytes:
    """Return the beginning only."""
    return content[: random.randrange(max(1, len(content)))]


def emptied(content: bytes, random: Random) -> bytes:
    """Nothing."""
    return b""


def extended(content: bytes, random: Random) -> bytes:
    """Append bytes."""
    return content + random.choice([b"\0", b"\n", b"x" * 17, content, random.randbytes(600), b"\n{}\n", b"\n[1]\n"])


def zeroed(content: bytes, random: Random) -> bytes:
    """A stretch of zeros."""
    begin = random.randrange(max(1, len(content)))
    size = random.choice([1, 4, 64, 512])
    return content[:begin] + bytes(min(size, len(content) - begin)) + content[begin + size :]


def overwritten(content: bytes, random: Random) -> bytes:
    """A few bytes set, as where a header says a size."""
    begin = random.randrange(max(1, min(len(content), random.choice([16, 128, 1 << 20]))))
    new = random.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80", b"\xff" * 8])
    return content[:begin] + new + content[begin + len(new) :]


def renumbered(content: bytes, random: Random) -> bytes:
    """One of the numbers in the text is another, perhaps none that can be."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content))
    if not found:
        return flipped(content, random)
    place = random.choice(found)
    return content[: place.start()] + random.choice(NUMBERS).encode() + content[place.end() :]


def recoded(content: bytes, random: Random) -> bytes:
    """Text in another encoding, with a mark in front or line ends of another kind."""
    text = content.decode("latin-1")
    return random.choice(
        [
            lambda: text.encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: content.replace(b"\n", b"\r"),
            lambda: content.replace(b"\n", "\u2028".encode()),
            lambda: content.replace(b" ", b"\xa0"),
            lambda: content.replace(b"\n", b"\n\n\n"),
            lambda: content.replace(b"\t", b" "),
        ]
    )()


def shuffled_lines(content: bytes, random: Random) -> bytes:
    """Lines that are gone, there twice, joined, or endless."""
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    kind = random.randrange(5)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(place, random.choice(lines))
    elif kind == 2:
        lines[place] = lines[place] * 20
    elif kind == 3:
        lines[place] += b"\t" + lines[random.randrange(len(lines))]
    else:
        random.shuffle(lines)
    return b"\n".join(lines)


def foreign(content: bytes, random: Random) -> bytes:
    """Return a file of another kind; one of them would write a file if it were run."""
    return random.choice([Trap.pickled, lambda: b"[" * 100_000, lambda: b"\x89PNG\r\n\x1a\n", lambda: b"PK\x03\x04"])()


class Trap:
    """Unpickling it makes the file `unpickled` in the working folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("unpickled", "w"))

    @staticmethod
    def pickled() -> bytes:
        return pickle.dumps(Trap())


def rewritten_json(content: bytes, random: Random) -> bytes:
    """A value of another kind somewhere in the tree, or one that is gone or there twice."""
    try:
        tree = json.loads(content)
    except ValueError:
        return flipped(content, random)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))
            walk(value)

    walk(tree)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        node, key = random.choice(places)
        kind = random.randrange(6)
        if kind == 0 and isinstance(node, dict):
            node.pop(key, None)
        elif kind == 0 and key < len(node):
            node.insert(key, node[key])
        elif isinstance(node, dict) or key < len(node):
            node[key] = random.choice(VALUES)
    return json.dumps(tree).encode()


def rewritten_tar(content: bytes, random: Random) -> bytes:
    """A whole tar with one member of another kind, name or place."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as packed:
            members = [(info, packed.extractfile(info).read() if info.isfile() else b"") for info in packed]  # type: ignore[union-attr]
    except Exception:
        return flipped(content, random)
    if not members:
        return content
    place = random.randrange(len(members))
    info, data = members[place]
    kind = random.randrange(9)
    if kind < 4:
        changed = tarfile.TarInfo(info.name)
        changed.type = random.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
        changed.linkname = random.choice(["nowhere", info.name, "../../etc/passwd", members[0][0].name, ""])
        # Next to the file, after it, or instead of it.
        members[place : place + random.randint(0, 1)] = random.choice(
            [[(changed, b"")], [members[place], (changed, b"")]]
        )
    elif kind == 4:
        info.name = random.choice(
            ["../x", "/x", "a/../../x.png", "\udcff.png", "n" * 300, ".", "", "x\n.png", info.name * 9]
        )
    elif kind == 5:
        members.append((info, damaged(data, "", random)))
    elif kind == 6:
        del members[place]
    elif kind == 7:
        members[place] = (info, damaged(data, Path(info.name).suffix, random))
    else:
        random.shuffle(members)
    target = io.BytesIO()
    form = random.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=target, mode="w", format=form) as packed:
        for info, data in members:
            info.size = len(data) if info.isfile() else 0
            packed.addfile(info, io.BytesIO(data))
    return target.getvalue()


def damage_file(file: Path, random: Random, beside: list[Path]) -> str:
    """Damage or replace a file; return a description."""
    beside = [other for other in beside if other.is_file() and not other.is_symlink()]  # as an earlier damage left them
    kind = random.random()
    if kind < 0.88:
        file.write_bytes(damaged(file.read_bytes(), file.suffix, random))
        return "content"
    if kind < 0.91:
        file.write_bytes(random.choice(beside).read_bytes())
        return "content of another file"
    file.unlink()
    if kind < 0.93:
        return "gone"
    if kind < 0.96:
        target = random.choice([file.name, "nowhere", ".", "/dev/null", *(os.fspath(other) for other in beside[:3])])
        file.symlink_to(target)
        return f"a link to {target}"
    if kind < 0.98:
        file.mkdir()
        return "a folder"
    if kind < 0.99:
        os.mkfifo(file)
        return "a pipe"
    with contextlib.suppress(shutil.Error):  # a pipe, or a link to nothing, is not copied
        shutil.copytree(file.parent, f"{file}.copied", symlinks=True) if len(beside) < 9 else file.touch()
    return "a copy of its folder"
