"""The page about attentions: a section, a picture and a command that draws it for everything registered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cached_lab.yaml_tree import apply_override
from cached_transformers.attentions import create_attention
from cached_transformers.registry import ATTENTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "attentions.md").read_text()


def test_every_attention_has_a_section() -> None:
    assert sorted(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == sorted(ATTENTIONS.names())


@pytest.mark.parametrize("name", ATTENTIONS.names())
def test_a_section_says_what_the_registry_says_and_how_its_picture_is_drawn(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    info = ATTENTIONS.entry(name).info
    for fact in ("equation", "order"):
        assert str(info[fact]) in section, f"{fact} of {name} is not that of `cached explain {name}`"
    command = shlex.split(re.findall(r"^cached explain .*$", section, re.MULTILINE)[0])
    picture = f"images/attentions/{name}.png"
    assert command[:3] == ["cached", "explain", name] and command[-2:] == ["--plot", f"docs/{picture}"]
    assert f"]({picture})" in section and (DOCS / picture).is_file()
    spec = {"name": name}
    for part in command[3:-2]:
        if "=" in part:
            apply_override(spec, part)
    create_attention(spec, width=128, heads=2, length=64, prefix=0, size=(8, 8), index=0, depth=1, causal=False)
