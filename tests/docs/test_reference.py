"""The reference page names every public function and class, each from where it is defined."""

from __future__ import annotations

import re

from docs.pages import PROJECT

import cached_transformers


def test_the_reference_has_every_public_name() -> None:
    page = (PROJECT / "docs/reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: (\S+)$", page, re.M))
    public = {*cached_transformers.__all__} - {"__version__", "ATTENTIONS", "MEMORIES", "MODELS"}
    objects = (getattr(cached_transformers, name) for name in public)
    assert named == {f"{thing.__module__}.{thing.__qualname__}" for thing in objects} | {"cached_transformers.state"}
