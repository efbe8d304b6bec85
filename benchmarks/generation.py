"""Generation speed: our language models with and without a memory, against GPT-2 of transformers and x-transformers.

All write the same number of tokens greedily after the same prompt, with the same layers, width, heads and feed-forward
and random weights. Ours, and GPT-2 with a memory, work by segments and forget what no memory carries; the peers attend
to the whole text with their KV caches.

Legend: B rows, N tokens of a prompt, T new tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command, memories
from benchmarks.memory_peers import ModelSizes, lacking, x_decoder
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.costs.timing import compare
from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.models.generation import generate
from cached_transformers.registry import unknown_name
from cached_transformers.state import State

NO_MEMORY = "no memory"
STANDARD = ("transformer_xl", "grc_stream", "rmt")
SIZES = {"vocabulary": 256, "width": 256, "depth": 4, "heads": 4}
Writer = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class GenerationSetting:
    """New tokens for each row after a prompt, in segments of a given length."""

    rows: int
    segment: int
    prompt: int = 16
    tokens: int = 384

    def prompt_BN(self, vocabulary: int, device: str) -> Tensor:
        """Return the prompt, the same for all models."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (self.rows, self.prompt), generator=generator).to(device)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memories", default=",".join(STANDARD), help="names separated by commas, or all")
    add_sizes(parser)
    parser.add_argument("--rows", type=command.numbers, default=(1, 8), help="texts at once (default: 1,8)")
    parser.add_argument("--segments", type=command.numbers, default=(128, 512), help="segment lengths of our models")
    parser.add_argument("--prompt", type=command.positive, default=16, help="tokens of the prompt (default: 16)")
    parser.add_argument("--tokens", type=command.positive, default=384, help="new tokens per row (default: 384)")
    command.add_dtype(parser, "of weights")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of `SIZES`."""
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=command.positive, default=value, help=f"default: {value}")


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that the options of `add_sizes` give."""
    return {name: getattr(options, name) for name in SIZES}


def measure(options: argparse.Namespace) -> command.Result:
    of_models = sizes_of(options)
    sizes, device, dtype = ModelSizes(**of_models), options.device, command.dtype_of(options)
    settings = {"dtype": options.dtype, **of_models, "prompt": options.prompt, "tokens": options.tokens}
    rows: list[command.Measurement] = []
    missing: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the peers
        for count in options.rows:
            for segment in options.segments:
                setting = GenerationSetting(count, segment, options.prompt, options.tokens)
                names = chosen(options.memories)
                rows += measure_setting(setting, names, sizes, options.rounds, device, dtype, missing)
    return command.Result(rows, as_markdown(rows, list(missing)), settings)


def chosen(names: str) -> list[str]:
    """Return the named memories of a causal language model, or all for "all"."""
    known = stream_memories()
    found = known if names == "all" else names.split(",")
    for name in found:
        if name not in known:
            raise ValueError(unknown_name("memory of a causal language model", name, known))
    return found


def build(name: str, sizes: ModelSizes, setting: GenerationSetting) -> nn.Module:
    """Build one of our models; a memory with a length gets the length of a segment."""
    own = with_length(sizes, setting)
    return memories.build(None if name == NO_MEMORY else memories.spec(name, own), own).eval()


def with_length(sizes: ModelSizes, setting: GenerationSetting) -> ModelSizes:
    """Return sizes whose segments, and memories with a length, have that of the setting's segments."""
    return dataclasses.replace(sizes, segment=setting.segment, memory=setting.segment)


def our_writer(
    model: nn.Module, sizes: ModelSizes, setting: GenerationSetting, device: str, state: State | None = None
) -> Callable[..., Tensor]:
    """Return a function that writes the text by `generate`, whose further options it takes."""
    prompt_BN = setting.prompt_BN(sizes.vocabulary, device)
    options: dict[str, Any] = {"tokens": setting.tokens, "segment_length": setting.segment, "temperature": 0}
    return lambda **more: generate(model, prompt_BN, state, **options, **more).tokens


def gpt2(
    sizes: ModelSizes, length: int, memory: str | None = None
) -> tuple[nn.Module, Callable[[Tensor, int], Tensor]]:
    """GPT-2 of transformers with fused attention and its own cache, and a memory or none."""
    model: Any = memories.host("gpt2", sizes, length + (memory is not None) * 2 * sizes.tokens).model
    if memory is not None:
        model = add_memory(model, memories.spec(memory, sizes), segment_length=sizes.segment)

    def write(prompt_BN: Tensor, tokens: int) -> Tensor:
        options = {"do_sample": False, "use_cache": True, "max_new_tokens": tokens, "pad_token_id": 0}
        with torch.no_grad():
            text_BL = model.generate(prompt_BN, attention_mask=torch.ones_like(prompt_BN), **options)
        return text_BL[:, prompt_BN.shape[1] :]  # type: ignore[no-any-return]

    return model, write


def x_transformers(sizes: ModelSizes, length: int) -> tuple[nn.Module, Callable[[Tensor, int], Tensor]]:
    """x-transformers with rotary positions, fused attention and its cache."""
    library = importlib.import_module("x_transformers")
    options = {"num_tokens": sizes.vocabulary, "max_seq_len": length, "use_abs_pos_emb": False}
    module = library.TransformerWrapper(**options, attn_layers=x_decoder(library, sizes))
    wrapper = library.AutoregressiveWrapper(module)
    return wrapper, lambda prompt_BN, tokens: wrapper.generate(prompt_BN, tokens, temperature=0.0, cache_kv=True)


class GenerationPeer(NamedTuple):
    """A distribution, and a builder of its model and writer with positions for `length` tokens."""

    distribution: str
    build: Callable[[ModelSizes, int], tuple[nn.Module, Callable[[Tensor, int], Tensor]]]


GPT2 = "GPT-2 of transformers"
PEERS = {GPT2: GenerationPeer("transformers", gpt2), "x-transformers": GenerationPeer("x-transformers", x_transformers)}
"""Peers by their names in a table; the first is the reference."""


def peer_writer(
    build: Callable[..., Any], sizes: ModelSizes, setting: GenerationSetting, device: str, dtype: torch.dtype
) -> tuple[nn.Module, Writer]:
    """Build a peer, and a function that writes the text."""
    torch.manual_seed(0)
    model, write = build(with_length(sizes, setting), setting.prompt + setting.tokens)
    prompt_BN = setting.prompt_BN(sizes.vocabulary, device)
    return model.to(device, dtype).eval(), functools.partial(write, prompt_BN, setting.tokens)


def measure_setting(
    setting: GenerationSetting,
    names: Sequence[str],
    sizes: ModelSizes,
    rounds: int,
    device: str,
    dtype: torch.dtype,
    missing: dict[str, None],
) -> list[command.Measurement]:
    """Measure all models in one setting; peers that are not installed, and refusals, are added to `missing`."""
    models: dict[str, nn.Module] = {}
    writers: dict[str, Writer] = {}
    for name, peer in PEERS.items():
        try:
            models[name], writers[name] = peer_writer(peer.build, sizes, setting, device, dtype)
        except ImportError as error:
            missing[lacking(peer.distribution, error)] = None
    for name in names if GPT2 in models else ():
        label, with_memory = f"{GPT2}, {name}", functools.partial(gpt2, memory=name)
        try:
            models[label], writers[label] = peer_writer(with_memory, sizes, setting, device, dtype)
        except ValueError as error:
            missing[f"{label}: {error}"] = None
    for name in (NO_MEMORY, *names):
        models[name] = build(name, sizes, setting).to(device, dtype)
        writers[name] = our_writer(models[name], sizes, setting, device)

    def checked(write: Writer) -> None:
        shape = tuple(write().shape)
        if shape != (setting.rows, setting.tokens):
            raise ValueError(f"tokens of shape {shape} were written, not {(setting.rows, setting.tokens)}")

    calls = {name: functools.partial(checked, write) for name, write in writers.items()}
    reference = GPT2 if GPT2 in models else NO_MEMORY
    times = compare(calls, reference, rounds)
    return [
        {
            "rows": setting.rows,
            "segment": setting.segment,
            "model": name,
            "parameters": count_parameters(model),
            "speed": setting.rows * setting.tokens / times[name].seconds,
            "time": times[name],
            "reference": reference,
        }
        for name, model in models.items()
    ]


def as_markdown(rows: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> str:
    """Write the rows as a Markdown table, and a line for each missing peer."""
    reference = rows[0]["reference"] if rows else GPT2
    head = ["rows", "segment", "model", "parameters (M)", "tokens/s", f"time, {reference} = 1", "fastest"]
    cells = []
    for row in rows:
        line = [str(row["rows"]), str(row["segment"]), row["model"], f"{row['parameters'] / 1e6:.2f}"]
        cells.append([*line, f"{row['speed']:,.0f}", *command.fastest(row["time"], row["model"] == reference)])
    return command.with_missing(command.table(head, cells), missing)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
