"""A written token after contexts of many lengths: KV caches of the whole text beside memories, in time and bytes.

GPT-2 and Llama of transformers attend every token of the context, whose cached keys are random; their cache grows
(DynamicCache) or is reserved (StaticCache). Ours continue the state after reading the context, and write one segment,
the write of the memory included. Bytes are those of the state and of all cached keys and values of the full segment.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command, generation
from benchmarks.generation import NO_MEMORY, GenerationSetting
from benchmarks.memories import host
from benchmarks.memory_peers import ModelSizes, lacking
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.experiments.costs.timing import interleaved, quartiles
from cached_lab.experiments.reports.figures.style import blank_figure, looks, save, style
from cached_transformers.extras import require
from cached_transformers.models.generation import generate
from cached_transformers.models.segments import read_segments
from cached_transformers.state import State, nbytes, seal

STANDARD = "streaming_llm,transformer_xl,rmt,grc_stream,armt,infini,block_retrieval"
HOSTS = {"GPT-2": "gpt2", "Llama": "llama"}
KV_CACHES = ("DynamicCache", "StaticCache")
GROWING = frozenset({"block_retrieval"})
"""Memories that keep all tokens."""
Writer = Callable[[Callable[[Tensor], None]], object]
"""Writes a segment, and calls its argument after every token."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memories", default=STANDARD, help="names separated by commas, or all")
    generation.add_sizes(parser)
    contexts = (256, 1024, 4096, 16384)
    parser.add_argument("--contexts", type=command.numbers, default=contexts, help="tokens, separated by commas")
    parser.add_argument("--segment", type=command.positive, default=128, help="tokens written (default: 128)")
    parser.add_argument("--gib", type=float, default=8, help="most GiB of all caches at one context (default: 8)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw time and bytes: PNG, SVG or PDF")


def measure(options: argparse.Namespace) -> command.Result:
    left_out: dict[str, None] = {}
    rows = [row for count in options.rows for row in measure_rows(count, options, left_out)]
    if options.figure is not None:
        draw(rows, options.figure)
    settings = {**generation.sizes_of(options), "segment": options.segment}
    return command.Result(rows, as_markdown(rows, left_out), settings)


def measure_rows(rows: int, options: argparse.Namespace, left_out: dict[str, None]) -> list[command.Measurement]:
    """Measure all models with one number of rows at every context; `left_out` gets reasons."""
    setting = GenerationSetting(rows, options.segment, 1, options.segment)
    sizes, device = ModelSizes(**generation.sizes_of(options)), options.device
    models: dict[str, Any] = {}
    for name, architecture in HOSTS.items():
        try:
            whole: Any = host(architecture, sizes, max(options.contexts) + setting.tokens)
        except ImportError as error:
            left_out[lacking("transformers", error)] = None
        else:
            models |= {f"{name}, {kind}": whole.model.to(device).eval() for kind in KV_CACHES}
    ours = [NO_MEMORY, *generation.chosen(options.memories)]
    models |= {name: generation.build(name, sizes, setting).to(device) for name in ours}
    states: dict[str, State] = {}
    found, before = [], 0
    for context in sorted(options.contexts):
        ids_BN = GenerationSetting(rows, 1, context - before).prompt_BN(sizes.vocabulary, device)
        needed, free, before = 8 * sizes.depth * sizes.width * rows * (context + setting.tokens), options.gib, context
        calls: dict[str, Any] = {}
        held: dict[str, int] = {}
        for name, model in models.items():
            if name not in ours or name in GROWING:
                free -= needed / 2**30
                if free < 0:
                    free += needed / 2**30
                    left_out[f"{name}, {rows} x {context:,} tokens ({needed / 2**30:.1f} GiB of --gib)"] = None
                    continue
            if name in ours:
                states[name] = read(model, ids_BN, setting.segment, states.get(name))
                make = partial(our_writer, model, states[name], setting)
            else:
                make = partial(cached_writer, model, name.split()[-1], setting, context)
            calls[name], held[name] = writer_and_bytes(make)
            held[name] += nbytes(states.get(name, ()))
        for name, seconds in interleaved(calls, options.rounds).items():
            sized = {"rows": rows, "context": context, "model": name, "mebibytes": held[name] / 2**20}
            found.append(sized | {"milliseconds": quartiles([1e3 * t / setting.tokens for t in seconds])})
    return found


@torch.no_grad()
def read(model: nn.Module, ids_BN: Tensor, segment: int, state: State | None = None) -> State:
    """Return the state after the segments of a text; the given state is not changed."""
    state = model.init_state(len(ids_BN)) if state is None else seal(state)  # type: ignore[operator]
    parts = ids_BN.split(segment, 1)
    for out in read_segments(lambda part_BN, s, _: model(part_BN, s, last_only=True), parts, state, in_place=True):
        state = out.state
    return state


def our_writer(model: nn.Module, state: State, setting: GenerationSetting) -> Writer:
    """Return a function that writes a segment after the state."""
    prompt_B1 = setting.prompt_BN(2, str(next(model.parameters()).device))
    lengths: dict[str, Any] = {"tokens": setting.tokens, "segment_length": setting.segment}
    return lambda each: generate(model, prompt_B1, state, temperature=0, each=each, **lengths)


def cached_writer(model: Any, kind: str, setting: GenerationSetting, context: int) -> Writer:
    """Return the same of a host with a KV cache of random tokens, to which the cache then returns."""
    library, config = require("transformers", extra="language"), model.config
    length, heads = context + setting.tokens, config.num_attention_heads
    cache = library.DynamicCache() if kind == KV_CACHES[0] else library.StaticCache(config, max_cache_len=length)
    keys = torch.randn(setting.rows, heads, context, config.hidden_size // heads, device=model.device)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)

    @torch.no_grad()
    def write(each: Callable[[Tensor], None]) -> None:
        token_B1 = setting.prompt_BN(2, model.device)
        for _ in range(setting.tokens):
            token_B1 = model(token_B1, past_key_values=cache).logits[:, -1:].argmax(-1)
            each(token_B1)
        if kind == KV_CACHES[0]:
            cache.crop(-setting.tokens)
        else:
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)

    return write


def writer_and_bytes(make: Callable[[], Writer]) -> tuple[Callable[[], object], int]:
    """Return a writer, and the most bytes that it holds after a token."""
    held: list[int] = []
    with LiveBytes() as live:
        write = make()
        write(lambda _: held.append(live.now))
    return partial(write, lambda _: None), max(held)


def as_markdown(rows: Sequence[command.Measurement], left_out: Iterable[str]) -> str:
    """Write the rows as a Markdown table, and a line for each model that was left out."""
    contexts = sorted({row["context"] for row in rows})
    lines: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        cells = lines.setdefault((row["rows"], row["model"]), [str(row["rows"]), row["model"], *[""] * 2 * len(contexts)])
        place = 2 + contexts.index(row["context"])
        cells[place] = "{:.2f} ({:.2f}-{:.2f})".format(*row["milliseconds"])
        cells[place + len(contexts)] = f"{row['mebibytes']:,.1f}"
    head = ["rows", "model", *(f"ms at {n:,}" for n in contexts), *(f"MiB at {n:,}" for n in contexts)]
    return "\n\n".join([command.table(head, list(lines.values())), *(f"Left out: {reason}." for reason in left_out)])


def draw(rows: Sequence[command.Measurement], path: Path) -> None:
    """Draw time and bytes against context, with a row of panels for each number of rows."""
    counts, chosen = sorted({row["rows"] for row in rows}), looks(row["model"] for row in rows)
    figure, axes = blank_figure(10.4, 3.6 * len(counts), len(counts), 2)
    contexts, ticker = sorted({row["context"] for row in rows}), require("matplotlib.ticker", extra="plot")
    panels = itertools.product(counts, {"milliseconds": "ms a token", "mebibytes": "MiB"}.items())
    with style():
        for ax, (count, (key, label)) in zip(axes.flat, panels, strict=True):
            for name, look in chosen.items():
                line = {r["context"]: r[key] for r in rows if (r["rows"], r["model"]) == (count, name)}
                at = [value if key == "mebibytes" else value[0] for value in line.values()]
                ax.plot(list(line), at, color=look.colour, ls=look.dash, marker=look.marker, ms=4, label=name)
            ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label, title=f"rows: {count}")
            ax.set_xticks(contexts, [f"{n:,}" for n in contexts])
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
