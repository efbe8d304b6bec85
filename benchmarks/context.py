"""A written token after contexts of many lengths: KV caches of the whole text beside memories, in time and bytes.

GPT-2 and Llama of transformers attend every token of the context, whose cached keys are random; their cache grows
(DynamicCache) or is reserved (StaticCache). Ours continue the state after reading the context, and write one segment,
the write of the memory included. Bytes are those of the state and of all cached keys and values of the full segment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import command, generation, memories
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.experiments.costs.timing import interleaved, quartiles
from cached_lab.experiments.reports.figures.style import blank_figure, looks, save, style
from cached_transformers.extras import require
from cached_transformers.integrations.memory_hooks import cache_name
from cached_transformers.state import State, nbytes

STANDARD = "streaming_llm,transformer_xl,rmt,grc_stream,armt,infini,block_retrieval"
GROWING = [f"{host}, {cache}" for host in ("gpt2", "llama") for cache in ("DynamicCache", "StaticCache")]
GROWING.append("block_retrieval")
"""Models that keep all tokens."""
Writer = Callable[..., object]
"""Writes a segment, and calls `each` after every token."""


def add_options(parser: argparse.ArgumentParser) -> None:
    generation.add_sizes(parser)
    parser.add_argument("--rows", type=command.numbers, default=(1, 8), help="texts at once (default: 1,8)")
    contexts = (256, 1024, 4096, 16384)
    parser.add_argument("--memories", default=STANDARD, help="names separated by commas, or all")
    parser.add_argument("--contexts", type=command.numbers, default=contexts, help="tokens, separated by commas")
    parser.add_argument("--segment", type=command.positive, default=128, help="tokens written (default: 128)")
    parser.add_argument("--gib", type=float, default=8, help="most GiB of all caches at one context (default: 8)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw time and bytes: PNG, SVG or PDF")


def measure(options: argparse.Namespace) -> command.Result:
    left_out: list[str] = []
    rows = [row for count in options.rows for row in measure_rows(count, options, left_out)]
    if options.figure is not None:
        draw(rows, options.figure)
    contexts, cells = sorted(options.contexts), {}
    for row in rows:
        time = "{:.2f} ms ({:.2f}-{:.2f})".format(*row["milliseconds"])
        cells[row["rows"], row["model"], row["context"]] = f"{time}, {row['mebibytes']:,.1f} MiB"
    models = dict.fromkeys((row["rows"], row["model"]) for row in rows)
    lines = [[str(n), name, *(cells.get((n, name, context), "") for context in contexts)] for n, name in models]
    text = command.table(["rows", "model", *(f"{n:,} tokens" for n in contexts)], lines)
    settings = {**generation.sizes_of(options), "segment": options.segment}
    return command.Result(rows, command.with_missing(text, left_out), settings)


def measure_rows(rows: int, options: argparse.Namespace, left_out: list[str]) -> list[command.Measurement]:
    """Measure all models with one number of rows at every context; `left_out` gets reasons."""
    setting = generation.GenerationSetting(rows, options.segment, 1, options.segment)
    sizes, device = ModelSizes(**generation.sizes_of(options)), options.device
    names = [generation.NO_MEMORY, *generation.chosen(options.memories)]
    models: dict[str, Any] = {}
    for name in GROWING[:-1]:
        host: Any = memories.host(name.split(",")[0], sizes, max(options.contexts) + setting.tokens)
        models[name] = host.model.to(device).eval()
    models |= {name: generation.build(name, sizes, setting).to(device) for name in names}
    states: dict[str, State] = {}
    found, before = [], 0
    for context in sorted(options.contexts):
        ids_BN = generation.GenerationSetting(rows, 1, context - before).prompt_BN(sizes.vocabulary, device)
        gib, free, before = sizes.depth * sizes.width * rows * (context + setting.tokens) / 2**27, options.gib, context
        calls: dict[str, Any] = {}
        held: dict[str, int] = {}
        for name, model in models.items():
            if name in GROWING and gib > free:
                left_out.append(f"{name}, {rows} x {context:,} tokens: {gib:.2g} GiB, of --gib {options.gib:g}")
                continue
            free -= gib if name in GROWING else 0
            if name in names:
                states[name] = memories.read(model, ids_BN, setting.segment, states.get(name))
                make: Any = partial(generation.our_writer, model, sizes, setting, device, states[name])
            else:
                make = partial(cached_writer, model, name.split()[-1], setting, context)
            calls[name], held[name] = writer_and_bytes(make)
            held[name] += nbytes(states.get(name, ()))
        for name, seconds in interleaved(calls, options.rounds).items():
            sized = {"rows": rows, "context": context, "model": name, "mebibytes": held[name] / 2**20}
            found.append(sized | {"milliseconds": quartiles([1e3 * t / setting.tokens for t in seconds])})
    return found


def cached_writer(model: Any, kind: str, setting: generation.GenerationSetting, context: int) -> Writer:
    """Return a writer of a host with a KV cache of random tokens, to which the cache then returns."""
    library, config = require("transformers", extra="language"), model.config
    length, heads, grows = context + setting.tokens, config.num_attention_heads, kind == "DynamicCache"
    cache = library.DynamicCache() if grows else library.StaticCache(config, max_cache_len=length)
    keys = torch.randn(setting.rows, heads, context, config.hidden_size // heads, device=model.device)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)

    @torch.no_grad()
    def write(each: Callable[[Tensor], object] = len) -> None:
        token_B1 = setting.prompt_BN(2, model.device)
        for _ in range(setting.tokens):
            token_B1 = model(token_B1, **{cache_name(model): cache}).logits[:, -1:].argmax(-1)
            each(token_B1)
        if grows:
            cache.crop(-setting.tokens)
        else:
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)

    return write


def writer_and_bytes(make: Callable[[], Writer]) -> tuple[Writer, int]:
    """Return a writer, and the most bytes that it holds after a token."""
    held: list[int] = []
    with LiveBytes() as live:
        write = make()
        write(each=lambda _: held.append(live.now))
    return write, max(held)


def draw(rows: Sequence[command.Measurement], path: Path) -> None:
    """Draw time and bytes against context, with a row of panels for each number of rows."""
    counts, contexts = (sorted({row[key] for row in rows}) for key in ("rows", "context"))
    figure, axes = blank_figure(10.4, 3.6 * len(counts), len(counts), 2)
    panels = [(n, key, label) for n in counts for key, label in (("milliseconds", "ms a token"), ("mebibytes", "MiB"))]
    with style():
        for ax, (count, key, label) in zip(axes.flat, panels, strict=True):
            for name, look in looks(row["model"] for row in rows).items():
                of_model = [row for row in rows if (row["rows"], row["model"]) == (count, name)]
                at = [row[key] if key == "mebibytes" else row[key][0] for row in of_model]
                drawn = {"color": look.colour, "ls": look.dash, "marker": look.marker, "ms": 4, "label": name}
                ax.plot([row["context"] for row in of_model], at, **drawn)
            ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label, title=f"rows: {count}")
            ax.set_xticks(contexts, [str(n) if n < 1024 else f"{n // 1024}k" for n in contexts])
            ax.yaxis.set_major_locator(require("matplotlib.ticker", extra="plot").LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
