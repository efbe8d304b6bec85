"""Measure memories on a pretrained decoder with long texts: perplexity by position, and pass keys.

All arms are the same model: with a memory, with each segment read separately, and with a KV cache of the whole text. A
pass key (Mohtashami and Jaggi 2023, arXiv:2305.16300) is a number that one sentence of a long text gives, and a
question after the text asks for. It is unlike repeated sentences, and easily found among them, but less unlike a book.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import hashlib
import itertools
import json
import math
import random
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from cached_lab.data.archives import OPENERS, as_text, naming
from cached_lab.tasks.language.completion import Words
from cached_lab.training.run_files import CONFIG
from cached_transformers.files import json_text, write_whole
from cached_transformers.integrations.adapters import add_memory, remove_memory
from cached_transformers.integrations.frozen_host import host_digest
from cached_transformers.integrations.memory_hooks import cache_name
from cached_transformers.integrations.transformers.memory_cache import DynamicCache
from cached_transformers.loops.streaming import read_stream
from cached_transformers.memories import memory_specs
from cached_transformers.models.segments import for_loops
from cached_transformers.models.session import Session
from cached_transformers.state import fingerprint, nbytes

from .efficiency import NONE, WHOLE, window_of
from .environment import environment, machine
from .load import load_run, read_run_config
from .pretrained import remember, without_positions
from .recall import asked_facts, asked_story, right_answers, stories_of
from .variants import parse_variant

FILE, FILLER = "read.json", "repeated sentences"
INTRODUCTION = "A pass key is hidden in the text below. Find it and remember it.\n\n"
SENTENCES = "The lake is calm. The boat is red. The wind is mild. We row there. We row back. "
STATED = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is"
DIGITS, FIRST_BIN = 5, 1024


class Arm(NamedTuple):
    """One way of reading: its name in tables, a memory's name and options or None, and the run that trained it."""

    name: str
    memory: dict[str, Any] | None
    run: Path | None = None


def parse_arms(text: str) -> list[Arm]:
    """Parse arms with commas between them: "none", "whole", a memory as in `parse_variant`, or the folder of a run.

    Raises:
        ValueError: an unknown memory or option, or a name that is repeated.
    """
    names = text.split(",")
    if len({*names}) < len(names):
        raise ValueError(f"--with {text!r} names an arm twice; leave one of them out")
    found = []
    for name in names:
        if (Path(name) / CONFIG).is_file():
            memories = [
                {"name": own, **given} for own, given in memory_specs(read_run_config(name).model.get("memory"))
            ]
            folder = Path(name)
            seeded = f"{folder.parent.name}/" if folder.name.startswith("seed_") else ""
            found.append(Arm(f"{seeded}{folder.name}", memories[0] if memories else None, folder))
            continue
        spec = {"none": NONE, "whole": WHOLE}.get(name) or parse_variant(name)
        if spec is None:
            raise ValueError(f"--with {name!r}: write none, for each segment separately, or whole")
        if spec not in (NONE, WHOLE):
            found.append(Arm(name, without_positions({"name": spec} if isinstance(spec, str) else spec)))
        else:
            found.append(Arm(spec, None))
    return found


def read_text(path: Path) -> str:
    """Return a text, plain or .xz, .gz, .bz2, without a frame of Project Gutenberg (ValueError if it is not UTF-8)."""
    with OPENERS.get(path.suffix, open)(path, "rb") as file, naming(path, "file"):
        text = as_text(file.read(), path)
    return re.sub(r"(?s)\A.*?\*\*\* ?START OF[^\n]*\n|\*\*\* ?END OF.*\Z", "", text).strip()


class LongTexts:
    """Measurements of one model, kept in a file: a repeated call adds the missing ones.

    Args:
        model: a decoder of transformers without a memory. words: of its tokenizer. name: of the model.
        segment: tokens of a segment. seed: of the pass keys. folder: of the file. command: for the record.

    Raises:
        ValueError: the file holds measurements of other settings.
    """

    def __init__(
        self, model: Any, words: Words, name: str, segment: int, seed: int, folder: Path, command: str
    ) -> None:
        self.model, self.words, self.segment, self.seed, self.path = model.eval(), words, segment, seed, folder / FILE
        settings = {
            "model": name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights": fingerprint(model),
            "segment_length": segment,
            "seed": seed,
        }
        self._loaded: tuple[Path, Any] | None = None
        kinds: dict[str, Any] = {"perplexity": [], "keys": [], "facts": [], "stories": []}
        self.content: dict[str, Any] = {"settings": settings, "texts": {}, **kinds}
        if self.path.is_file():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))
            if (found := self.content["settings"]) != settings:
                raise ValueError(f"{self.path} holds measurements of {found}, not {settings}; give another --out")
        self.content = kinds | self.content
        self.content |= {"longest": getattr(model.config, "max_position_embeddings", None), "command": command}
        self.content["environment"] = environment(model.device) | {"machine": machine()}

    def windows(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return a window of as many bytes for each memory that is no window itself.

        Raises:
            ValueError: a state grows, or is smaller than one slot of a window.
        """

        def build(memory: Any) -> Any:
            with torch.device("meta"):
                bare = type(self.model)(copy.deepcopy(self.model.config)).to(self.model.dtype)
                return for_loops(add_memory(bare, memory, **segments))

        segments, found = {"segment_length": self.segment}, []
        for arm in arms:
            if arm.memory and (window := window_of(arm.memory, build, relative=False)):
                found.append(Arm(f"window of {arm.name}", window))
        return found

    def _refuse_other(self, texts: Mapping[str, str]) -> None:
        """Refuse (ValueError) a text or a prompt that is not the one of the measurements of its name."""
        for name, content in texts.items():
            digest = hashlib.sha256(f"{INTRODUCTION}{STATED}{QUESTION}{content}".encode()).hexdigest()
            if self.content["texts"].setdefault(name, digest) != digest:
                raise ValueError(f"{self.path} holds measurements of another {name}; give another --out")

    def perplexities(self, arms: Sequence[Arm], texts: Mapping[str, str], tokens: int) -> Iterator[str]:
        """Read the first tokens of each text with each arm; yields a line for each."""
        self._refuse_other(texts)
        for text, content in texts.items():
            ids = [*self.words.first, *self.words.encode(content)][: tokens + 1]
            for arm in arms:
                about = {"arm": arm.name, "text": text, "tokens": len(ids) - 1, "memory": arm.memory is not None}
                if not self._stored("perplexity", about):
                    with self._remembering(arm) as model, torch.no_grad():
                        row = self._read(arm, model, ids)
                    self._keep("perplexity", about | row)
                    (end, last), speed = row["bins"][-1], about["tokens"] / row["seconds"]
                    yield f"{text}, {arm.name}: perplexity {last:.2f} up to {end:,} tokens, {speed:,.0f} tokens/s"

    def _read(self, arm: Arm, model: Any, ids: list[int]) -> dict[str, Any]:
        most = len(ids) - 1
        ends = [*(FIRST_BIN << k for k in range(30) if FIRST_BIN << k < most), most]
        counts, sums, read, size = [0] * len(ends), [0.0] * len(ends), 0, 0
        blocks = [0.0] * (most // FIRST_BIN)
        clock = time.perf_counter()
        for count, nats, size in self._losses(arm, model, ids):  # noqa: B007
            at = bisect.bisect_right(ends, read)
            counts[at], sums[at] = counts[at] + count, sums[at] + nats
            if read // FIRST_BIN < len(blocks):
                blocks[read // FIRST_BIN] += nats / FIRST_BIN
            read += count
        bins = [(end, math.exp(nats / count)) for end, nats, count in zip(ends, sums, counts, strict=True)]
        return {"bins": bins, "blocks": blocks, "seconds": time.perf_counter() - clock, "state_bytes": size}

    def _losses(self, arm: Arm, model: Any, ids: list[int]) -> Iterator[tuple[int, float, int]]:
        """Yield tokens, nats, and bytes of the state after each segment."""
        if arm.memory is not None or arm.run is not None:
            for now in read_stream(model, [ids], self.segment, in_place=True):
                yield now.segment_tokens, now.segment_nats, nbytes(now.state)
            return
        cache, length = (
            (DynamicCache(config=self.model.config), FIRST_BIN) if arm.name == WHOLE else (None, self.segment)
        )
        for begin in range(0, len(ids) - 1, length):
            piece_1N = torch.tensor([ids[begin : begin + length + 1]], device=self.model.device)
            kept = {cache_name(self.model): cache, "use_cache": cache is not None}
            out = self.model(piece_1N[:, :-1], **kept)
            nats = F.cross_entropy(out.logits[0].float(), piece_1N[0, 1:], reduction="sum").item()
            yield piece_1N.shape[1] - 1, nats, 0 if cache is None else _cache_bytes(cache)

    def pass_keys(
        self, arms: Sequence[Arm], texts: Mapping[str, str], lengths: Sequence[int], trials: int
    ) -> Iterator[str]:
        """Ask each arm for one key per trial, in repeated sentences and in each text; yields a line for each length.

        Raises:
            ValueError: a text is shorter than the longest length, or a length has no room for the key.
        """
        self._refuse_other({FILLER: SENTENCES, **texts})
        hays = {FILLER: self.words.encode(SENTENCES) * (1 + max(lengths) // 16)}
        hays |= {name: self.words.encode(content) for name, content in texts.items()}
        for name, hay in hays.items():
            if len(hay) < max(lengths):
                raise ValueError(f"--keys {max(lengths)}: {name} has {len(hay):,} tokens; give a longer text")
        for (name, hay), length, arm in itertools.product(hays.items(), lengths, arms):
            asked = []
            for trial in range(trials):
                about = {"arm": arm.name, "text": name, "length": length, "trial": trial}
                if not (found := self._stored("keys", about)):
                    with self._remembering(arm) as model:
                        found = about | self._ask(
                            arm, model, hay, f"{self.seed} {name} {length} {trial}", length, trial
                        )
                    self._keep("keys", found)
                asked.append(found)
            right, speed = sum(row["right"] for row in asked), median(length / row["seconds"] for row in asked)
            yield f"{name}, {length:,} tokens, {arm.name}: {right} of {trials} keys, {speed:,.0f} tokens/s"

    def _ask(self, arm: Arm, model: Any, hay: list[int], seed: str, length: int, trial: int) -> dict[str, Any]:
        """Read one text of `length` tokens with its question, and score the answer."""
        draw, encode = random.Random(seed), self.words.encode
        key = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        begin, stated, question = (
            [*self.words.first, *encode(INTRODUCTION)],
            encode(STATED.format(key=key)),
            encode(QUESTION),
        )
        room = length - len(begin) - len(stated) - len(question)
        if room < 0:
            raise ValueError(f"--keys {length}: introduction, key and question take {length - room} tokens; give more")
        # 1/2, 1/4, 3/4, 1/8, ...: further trials fill the gaps between the places of the first ones.
        place = room * int(f"{trial + 1:b}"[::-1], 2) >> (trial + 1).bit_length()
        hay = hay[(start := draw.randrange(len(hay) - room + 1)) : start + room]
        text, clock = [*begin, *hay[:place], *stated, *hay[place:]], time.perf_counter()
        if arm.memory is None:
            model = model if arm.run is None else model.model
            ids = [*text, *question][0 if arm.name == WHOLE else -self.segment :]
            ids_1N = torch.tensor([ids], device=self.model.device)
            written_1N = model.generate(
                ids_1N, attention_mask=torch.ones_like(ids_1N), max_new_tokens=DIGITS + 2, do_sample=False
            )[:, len(ids) :]
            seconds = time.perf_counter() - clock
        else:
            session = Session(model, self.segment)
            session.read(torch.tensor([text]))
            seconds = time.perf_counter() - clock
            session.read(torch.tensor([question]))
            written_1N = session.generate(tokens=DIGITS + 2, temperature=0).tokens
        answer = self.words.decode(written_1N[0].tolist()).strip()[:DIGITS]
        digits = sum(a == b for a, b in zip(key, answer, strict=False)) / DIGITS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
        return {"place": place, "right": answer == key, "digits": digits, "seconds": seconds, "peak_mib": peak}

    def recalled(
        self,
        kind: str,
        arms: Sequence[Arm],
        texts: Mapping[str, str],
        lengths: Sequence[int],
        trials: int,
        babi: Path | None = None,
    ) -> Iterator[str]:
        """Ask each arm for "facts", or for "stories" of bAbI, after texts; yields a line for each length (`recall.py`).

        Raises:
            ValueError: a text is too short, or a length has no room for the questions.
        """
        self._refuse_other(texts)
        stories = [] if babi is None else stories_of(babi)
        hays = {name: self.words.encode(content) for name, content in texts.items()}
        for (name, hay), length, arm in itertools.product(hays.items(), lengths, arms):
            asked: list[bool] = []
            for trial in range(trials):
                about = {"arm": arm.name, "text": name, "length": length, "trial": trial}
                if not (found := self._stored(kind, about)):
                    draw = random.Random(f"{self.seed} {kind} {name} {length} {trial}")
                    story = (draw.choice(stories),) if kind == "stories" else ()
                    text = (asked_story if story else asked_facts)(self.words, hay, length, draw, *story)
                    with self._remembering(arm) as model:
                        alone = arm.name if arm.memory is None and arm.run is None else ""
                        found = about | {"right": right_answers(model, text, self.segment, alone)}
                    self._keep(kind, found)
                asked += found["right"]
            yield f"{name}, {length:,} tokens, {arm.name}: {sum(asked)} of {len(asked)} {kind}"

    def _trained(self, folder: Path) -> Any:
        """Return the model of a run (ValueError: another host, precision or segment length)."""
        if self._loaded is None or self._loaded[0] != folder:
            self._loaded = None  # frees the last one before
            config, model, _ = load_run(folder, "tested")
            host: Any = model.model
            if (length := config.training.segment_length) != self.segment:
                raise ValueError(
                    f"--with {folder}: it trained in segments of {length} tokens, not {self.segment}; give "
                    f"--segment-length {length}"
                )
            if host.dtype != self.model.dtype or not torch.equal(host_digest(host), host_digest(self.model)):
                raise ValueError(
                    f"--with {folder}: it trained on another host than {self.content['settings']['model']} in "
                    f"{self.model.dtype}; give that model, and --dtype {str(host.dtype).removeprefix('torch.')}"
                )
            self._loaded = folder, model.eval()
        return self._loaded[1]

    @contextlib.contextmanager
    def _remembering(self, arm: Arm) -> Iterator[Any]:
        """Yield the model with the arm's memory (ValueError: a text is longer than its table of positions)."""
        added = arm.memory is not None and arm.run is None
        model = self.model if arm.run is None else self._trained(arm.run)
        if added:
            remember(model, self.content["settings"]["model"], arm.memory, self.segment)
        try:
            yield model
        except IndexError as error:  # of an embedding
            raise ValueError(
                f"{arm.name}: the model has positions for {self.content['longest']} tokens ({error}); give fewer "
                "tokens, or leave the arm out"
            ) from error
        finally:
            if added:
                remove_memory(model)

    def _stored(self, kind: str, about: Mapping[str, Any]) -> dict[str, Any] | None:
        return next((row for row in self.content[kind] if about.items() <= row.items()), None)

    def _keep(self, kind: str, row: dict[str, Any]) -> None:
        self.content[kind].append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json_text(self.content))


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
