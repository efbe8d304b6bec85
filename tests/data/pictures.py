"""Made image files for tests, and the archives and layouts that they come in."""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

Files = Mapping[str, bytes]


def encoded(seed: int = 0, size: tuple[int, int] = (9, 7), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A file of noise; `size` is (width, height)."""
    shape = (size[1], size[0], *((len(mode),) if len(mode) > 1 else ()))
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return saved(Image.fromarray(pixels).convert(mode), kind)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_files(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def packed_tar(files: Files) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def packed_zip(files: Files) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for place, (name, content) in enumerate(files.items()):
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if place % 2 else zipfile.ZIP_STORED)
    return target.getvalue()


def write_tar(path: Path, files: Files) -> Path:
    return write_files(path.parent, {path.name: packed_tar(files)}) / path.name


def write_tar_xz(path: Path, files: Files) -> Path:
    path.write_bytes(lzma.compress(packed_tar(files)))
    return path


def write_zip(path: Path, files: Files) -> Path:
    path.write_bytes(packed_zip(files))
    return path


def class_folders(classes: int = 3, images: int = 4, kind: str = "PNG") -> dict[str, bytes]:
    """`class<c>/<i>.png` with different pixels each."""
    suffix = {"PNG": "png", "JPEG": "jpg"}[kind]
    return {f"class{c}/{i}.{suffix}": encoded(1000 * c + i, kind=kind) for c in range(classes) for i in range(images)}
