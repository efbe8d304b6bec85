"""Drill: random calls of `generate` of hosts with a memory, in one turn or several.

A case is `seed/number`: a host, a memory and a text per row that grows from turn to turn. Each result is compared with
a plain loop: one forward over a row's whole text for each token, without padding and without keys and values. Sampled
tokens and beams are compared with a call that reads the whole text, without keys and values, from the same seed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cached_transformers.state import map_state, named_tensors

from .frame import Failure

NEAR = 1e-4
"""Scores this close may be told apart by rounding."""
HOSTS = ("gpt2", "llama", "gpt_neox", "bloom", "gptj", "opt", "mistral", "qwen2", "falcon", "gemma")
REFUSED: dict[str, Any] = {
    "prompt_lookup_num_tokens": 2,
    "assistant_early_exit": 1,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "document_ids": torch.zeros(1, 4, dtype=torch.long),
    "cache_implementation": "static",
    "output_attentions": True,
}


def prepare(shared: Path) -> None:
    """Import and build one model, so that cases find the libraries ready."""
    from integrations.families import DECODERS

    torch.set_num_threads(1)
    for family in DECODERS:
        if family.name in HOSTS:
            family.build()


def attempt(case: str, folder: Path) -> None:
    """Draw the model and the turns of a case."""
    from integrations.families import DECODERS
    from integrations.family_checks import STREAMS
    from integrations.transformers_hosts import awaken

    warnings.simplefilter("ignore")
    rng = Random(case)
    family = rng.choice([family for family in DECODERS if family.name in HOSTS])
    memory = rng.choice([*STREAMS, "infini"])
    length = rng.choice([1, 2, 3, 5, 8, None])
    options = {"segment_length": length} if memory != "crtn" else {}
    try:
        model = awaken(family.with_memory(STREAMS.get(memory, {"name": memory}), **options))
    except ValueError as refusal:  # a memory that this host does not take
        if memory not in str(refusal):
            raise
        return
    Call(model, rng, f"{family}, {memory}, segment_length={length}").turns()


class Call:
    """One text per row, which grows with each turn; `said` describes the turns for messages."""

    def __init__(self, model: Any, rng: Random, said: str) -> None:
        self.model, self.rng, self.said = model, rng, said
        self.rows, self.segmented = rng.randint(1, 3), model.get_decoder().segment_reader.segment_length is not None
        torch.manual_seed(rng.randrange(2**31))
        self.state = None
        if rng.random() < 0.5:
            with torch.no_grad():
                self.state = model(self.words(6)).memory_state
        self.ids = self.words(rng.randint(1, 9))
        self.mask = torch.ones_like(self.ids)
        if rng.random() < 0.5:
            padded = torch.tensor([rng.randrange(self.ids.shape[1]) for _ in range(self.rows)])
            self.mask = (torch.arange(self.ids.shape[1]) >= padded[:, None]).long()
            self.ids = self.ids.masked_fill(self.mask == 0, 2)
        self.cache: Any = None

    def words(self, tokens: int) -> Tensor:
        return torch.randint(3, self.model.config.vocab_size, (self.rows, tokens))

    def turns(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if not self.turn():
                return
            more = self.words(self.rng.randint(1, 4))
            self.ids, self.mask = torch.cat([self.ids, more], 1), torch.cat([self.mask, torch.ones_like(more)], 1)

    def turn(self) -> bool:
        """Generate; return True if the text may go on."""
        rng, kind = self.rng, self.rng.choice(["greedy", "greedy", "sample", "beams"])
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 9), "pad_token_id": 2, "memory_state": self.state}
        options |= {"do_sample": kind == "sample", "num_beams": 3 if kind == "beams" else 1, "top_k": 0}
        options |= {"num_return_sequences": rng.choice([1, 2]) if kind != "greedy" else 1}
        options |= {"eos_token_id": rng.choice([None, list(range(3, 20))]), "return_dict_in_generate": True}
        prompt = self.prompt()
        cached, more = self.past(prompt)
        seed = rng.randrange(2**31)
        self.said += f"\n{kind}, {list(prompt)}, {cached}, mask {self.mask.tolist()}, {options | {'memory_state': ...}}"
        whole = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False, **options}
        call = {**prompt, **more, **options}
        if rng.random() < 0.2:
            name = rng.choice(list(REFUSED))
            found = self.refusal({**copy.deepcopy(call), name: REFUSED[name]})
            if name not in found:
                raise Failure(f"{self.said}\nexpected a refusal of {name}, found {found}")
        if rng.random() < 0.2 and self.segmented:
            self.model.train()  # hosts are not put into evaluation mode; there is no dropout
            if rng.random() < 0.5:
                self.model.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        if list(prompt) == ["input_ids"] and call.get("use_cache", True):
            call["prefill_chunk_size"] = rng.choice([None, None, 2])
        out = self.run(call, kind)
        torch.manual_seed(seed)
        twin = self.model.generate(**whole)
        self.model.eval()
        tokens = out.sequences if "input_ids" not in prompt else out.sequences[:, prompt["input_ids"].shape[1] :]
        self.compare(tokens, out.memory_state, options, kind, twin.sequences[:, self.ids.shape[1] :])
        goes_on = kind != "beams" and len(tokens) == self.rows and options["eos_token_id"] is None
        if goes_on:
            self.cache = out.get("past_key_values")
            self.ids, self.mask = torch.cat([self.ids, tokens], 1), torch.cat([self.mask, torch.ones_like(tokens)], 1)
        return goes_on

    def prompt(self) -> dict[str, Any]:
        embedded = self.model.get_input_embeddings()(self.ids).detach()
        return self.rng.choice(
            [{"input_ids": self.ids}, {"inputs_embeds": embedded}, {"input_ids": self.ids, "inputs_embeds": embedded}]
        )

    def past(self, prompt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Keys and values, by name and as options of the call."""
        from transformers import DynamicCache

        own, count = DynamicCache(), self.rng.randint(0, self.ids.shape[1] - 1)
        ways: dict[str, dict[str, Any]] = {
            "none": {"use_cache": "inputs_embeds" in prompt or self.rng.choice([True, False])},
            "dynamic": {"cache_implementation": "dynamic"},
            "the caller's": {"past_key_values": own},
        }
        if count:
            ways["of the first tokens"] = {"past_key_values": own}
        if self.cache is not None:
            ways |= {name: {"past_key_values": self.cache} for name in ("of the last turn", "of the last turn, too")}
            ways["a copy"] = {"past_key_values": copy.deepcopy(self.cache)}
        name = self.rng.choice(list(ways))
        if name == "of the first tokens":
            begun = {"attention_mask": self.mask[:, :count], "memory_state": self.state}
            with torch.no_grad():
                self.model(self.ids[:, :count], past_key_values=own, use_cache=True, **begun)
        plain = name == "none" and bool(self.mask.all()) and self.cache is None and self.rng.random() < 0.5
        return name, {**ways[name], **({} if plain else {"attention_mask": self.mask})}

    def run(self, call: dict[str, Any], kind: str) -> Any:
        """The call, perhaps with a streamer on another thread."""
        if kind == "beams" or self.rows * call["num_return_sequences"] > 1 or self.rng.random() < 0.7:
            with torch.inference_mode() if self.rng.random() < 0.2 else contextlib.nullcontext():
                return self.model.generate(**call)
        parts: list[Tensor] = []
        call["streamer"] = SimpleNamespace(put=lambda tokens: parts.append(tokens.flatten()), end=lambda: None)
        thread = threading.Thread(target=lambda: parts.append(self.model.generate(**call)))
        thread.start()
        thread.join()
        if (
            len(parts) < 2
            or not isinstance(parts[-1], dict)
            or parts[-2].tolist() != parts[-1].sequences[0, -1:].tolist()
        ):
            raise Failure(f"{self.said}\nexpected the last token in the streamer, found {parts}")
        return parts[-1]

    def refusal(self, call: dict[str, Any]) -> str:
        try:
            self.model.generate(**call)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return "none"

    @torch.no_grad()
    def compare(self, tokens: Tensor, after: Any, options: dict[str, Any], kind: str, twin: Tensor) -> None:
        ends, times = options["eos_token_id"] or [], options["num_return_sequences"]
        if len(tokens) != self.rows * times or (kind != "greedy" and not torch.equal(tokens, twin)):
            raise Failure(f"{self.said}\nexpected {twin.tolist()}, found {tokens.tolist()}")
        for row, found in enumerate(tokens):
            source = row // times
            text = self.ids[source, self.mask[source].bool()][None]
            own = None if self.state is None else map_state(lambda t: t[source : source + 1], self.state)  # noqa: B023
            new, near = found.tolist(), False
            stop = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
            for place in range(stop if kind == "greedy" else 0):
                read = torch.cat([text, found[None, :place]], 1)
                logits = self.model(read, memory_state=own, use_cache=False).logits[0, -1]
                near = bool(logits.max() - logits[new[place]] < NEAR)
                if not near:
                    raise Failure(f"{self.said}\nrow {row}: expected {int(logits.argmax())} at {place}, found {new}")
            read = torch.cat([text, found[None, : stop - 1]], 1)
            expected = self.model(read, memory_state=own, use_cache=False).memory_state
            mine = map_state(lambda t: t[row : row + 1], after)  # noqa: B023
            for (name, a), (_, b) in zip(named_tensors(mine), named_tensors(expected), strict=True):
                if not torch.allclose(a.double(), b.double(), 1e-3, 1e-3):
                    raise Failure(f"{self.said}\nrow {row}: the state after it differs in {name}: {a} for {b}")


SUMMARY = (
    "`generate` of ten hosts by memories, segments, padded rows, prompts as ids or embeddings, caches of earlier "
    "calls, greedy, sampled and by beams: the tokens and the state of a plain loop over whole texts, or a message that "
    "names the option"
)
COUNT, SAMPLE = 150, 6
