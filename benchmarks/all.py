"""All subjects on one card in minutes: attentions, memories, image models and generation, eager and compiled.

Each row has its time next to the first case of its group, and its share of the card's measured peaks. Results are
written after every part, so that a failure later on costs none of them. Groups are built as they are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import attentions, command, generation, memories
from benchmarks.attention_peers import PEERS as ATTENTION_PEERS
from benchmarks.groups import BenchmarkCase, BenchmarkReport, Call, CaseGroup, Unavailable, measure_group, one_line
from benchmarks.memory_peers import PEERS, ModelSizes, lacking, scratch_folder
from benchmarks.peaks import measure_peaks
from cached_lab.experiments.costs.throughput import MODELS, build_backbones, fold_caches, image_batch
from cached_lab.experiments.costs.timing import precision, training_step
from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers.registry import ATTENTIONS

Part = Callable[[str, bool], Iterator[CaseGroup]]
"""Groups for a device; tiny ones if the second argument is True."""
DTYPES = (torch.bfloat16, torch.float32)
EXACT, LINEAR, DELTA = "SDPA", "linear, causal", "delta_net of silu, causal"
KERNELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{
        f"{name} by FlexAttention": (name, False, {"kernel": "flex"})
        for name in ("longformer", "image_transformer", "sparse_transformer", "axial", "bigbird")
    },
    f"{LINEAR} by fla": ("linear", True, {"kernel": "fla"}),
    f"{DELTA} by fla": ("delta_net", True, {"kernel": "fla", "features": "silu"}),
}
"""Our mechanisms through other kernels, each next to its plain form."""
IMAGE_MODELS = ("ViT-S", "PVT-Tiny", "Swin-T")
BY_TOKENS = frozenset({"feedback"})
"""Memories that process a segment token by token: timed separately on a short text."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which nothing is begun (default: 8)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a test of the command")


def measure(options: argparse.Namespace) -> Iterator[command.Result]:
    """Time everything that time allows, a result after each part; each part gets its share of the time left."""
    end = time.monotonic() + 60 * options.minutes
    sizes = {"side": 256, "mebibytes": 16} if options.quick else {}
    report = BenchmarkReport(measure_peaks(options.device, DTYPES, **sizes))
    for index, (name, part) in enumerate(PARTS.items()):
        now = time.monotonic()
        until = now + (end - now) / (len(PARTS) - index)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from peers and compilers
                for group in part(options.device, options.quick):
                    measure_group(group, report, options.rounds, options.device, until)
        except Exception as error:
            report.failed.append(f"{name}: {one_line(error)}")
        settings = {"measured peaks": str(report.peaks), "quick": options.quick}
        yield command.Result(report.rows, as_markdown(report), settings, report.failed, report.left_out)


def as_markdown(report: BenchmarkReport) -> str:
    """Write a table for each part and dtype, and the cases that failed or were left out."""
    groups: dict[tuple[str, str, str], list[command.Measurement]] = {}
    for row in report.rows:
        groups.setdefault((row["part"], row["work"], row["dtype"]), []).append(row)
    head = ["case", "ms", "time, first = 1", "fastest", "% of peak FLOPs", "% of peak bytes", "peak MiB"]
    pieces = []
    for (part, work, dtype), rows in groups.items():
        cells = []
        for row in rows:
            shares = ("" if row[key] is None else f"{row[key]:.1f}" for key in ("flops_share", "bytes_share"))
            line = [row["case"], f"{1e3 * row['time'].seconds:,.2f}"]
            line += [*command.fastest(row["time"], row["case"] == row["reference"]), *shares]
            cells.append([*line, "" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"])
        pieces.append(f"**{part}**: {work}, {dtype}\n\n{command.table(head, cells)}")
    for title, lines in {"Failed": report.failed, "Left out": report.left_out}.items():
        if lines:
            pieces.append("\n".join([f"{title}:", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(pieces)


def attention_part(device: str, quick: bool) -> Iterator[CaseGroup]:
    """Every mechanism, forward and backward, next to SDPA, FlexAttention and published kernels."""
    length, rows = (64, 1) if quick else (4096, 4)
    window = min(512, length // 2)
    for dtype in DTYPES:
        given = partial(attentions.inputs, length, device, dtype, rows)

        def core(name: str, causal: bool, options: dict[str, Any], given: Any = given, dtype: Any = dtype) -> Call:
            if "kernel" in options and device != "cuda":
                raise Unavailable("kernels need a GPU")
            if options.get("kernel") == "fla":
                _fla(device)
            return attentions.step_of(attentions.build(name, length, device, dtype, **options), given(), causal)

        cases = {EXACT: BenchmarkCase(partial(core, "softmax", False, {}))}
        cases["SDPA, causal"] = BenchmarkCase(partial(core, "softmax", True, {}))
        for name in ATTENTIONS.names():
            if name != "softmax" and length <= attentions.LONGEST.get(name, length):
                causal = attentions.is_causal(name)
                cases[f"{name}, causal" if causal else name] = BenchmarkCase(partial(core, name, causal, {}))
        cases[LINEAR] = BenchmarkCase(partial(core, "linear", True, {}))
        cases[DELTA] = BenchmarkCase(partial(core, "delta_net", True, {"features": "silu"}))
        for title, (name, causal, options) in KERNELS.items():
            cases[title] = BenchmarkCase(partial(core, name, causal, options), title.split(" by ")[0])
        cases["fla's linear, causal"] = BenchmarkCase(partial(_fla_linear, given, device), LINEAR)
        if dtype == torch.float32:
            for peer in ATTENTION_PEERS.values():
                make = partial(_attention_peer, peer, given, length, device)
                cases[f"{peer.distribution} (peer)"] = BenchmarkCase(make)
        else:  # fla's delta rule takes no float32
            cases["fla's delta rule, causal"] = BenchmarkCase(partial(_fla_delta, given, device), DELTA)
        flex = partial(_flex, given, length, device, window)
        cases[f"FlexAttention, window of {window}"] = BenchmarkCase(flex, None)
        yield CaseGroup("attentions", f"{rows} rows of {length} tokens, forward and backward", dtype, cases)


def _flex(given: Any, length: int, device: str, window: int) -> Call:
    if device != "cuda":
        raise Unavailable("FlexAttention has a backward pass only on a GPU")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    distance = window // 2
    mask = flex.create_block_mask(lambda b, h, i, j: (i - j).abs() <= distance, None, None, length, length, device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return attentions.step_of_peer(lambda t: compiled(t["q"], t["k"], t["v"], block_mask=mask), given())


def _fla(device: str) -> Any:
    if device != "cuda" or importlib.util.find_spec("fla") is None:
        raise Unavailable("flash-linear-attention (fla) is not installed" if device == "cuda" else "fla needs a GPU")
    return importlib.import_module("fla.ops")


def _fla_linear(given: Any, device: str) -> Call:
    kernel = _fla(device).chunk_linear_attn

    def run(t: Any) -> Tensor:
        parts = (F.elu(t["q"]) + 1, F.elu(t["k"]) + 1, t["v"])
        return kernel(*(x.transpose(1, 2).contiguous() for x in parts), normalize=True)[0]  # type: ignore[no-any-return]

    return attentions.step_of_peer(run, given())


def _fla_delta(given: Any, device: str) -> Call:
    kernel = _fla(device).chunk_delta_rule

    def run(t: Any) -> Tensor:
        parts = (*(F.normalize(F.silu(t[name]), dim=-1) for name in "qk"), t["v"])
        beta = torch.sigmoid(t["x"][..., : attentions.HEADS])
        return kernel(*(x.transpose(1, 2).contiguous() for x in parts), beta)[0]  # type: ignore[no-any-return]

    return attentions.step_of_peer(run, given())


def _attention_peer(peer: Any, given: Any, length: int, device: str) -> Call:
    if importlib.util.find_spec(peer.module) is None:
        raise Unavailable(f"{peer.distribution} is not installed")
    return attentions.step_of_peer(peer.build(length, attentions.HEADS, attentions.HEAD_WIDTH, device), given())


def memory_part(device: str, quick: bool) -> Iterator[CaseGroup]:
    """A training step of every stream memory, next to the model without a memory and published implementations."""
    whole, names = language_sizes(quick), stream_memories()
    short = dataclasses.replace(whole, segment=min(whole.segment, 64), segments=1)
    groups = [(dtype, whole, [n for n in names if n not in BY_TOKENS]) for dtype in DTYPES]
    for dtype, sizes, chosen in [*groups, (torch.bfloat16, short, [n for n in names if n in BY_TOKENS])]:
        cases = {"no memory": BenchmarkCase(partial(memories.our_step, None, sizes, device, dtype))}
        for name in chosen:
            cases[name] = BenchmarkCase(partial(memories.our_step, name, sizes, device, dtype))
            if name in PEERS:
                peer = partial(_memory_peer, name, sizes, device, dtype)
                cases[f"{PEERS[name].distribution} (peer)"] = BenchmarkCase(peer)
        yield CaseGroup("memories", language_work(sizes), dtype, cases)


def language_sizes(quick: bool) -> ModelSizes:
    """Return the sizes of language models."""
    if quick:
        return ModelSizes(vocabulary=16, width=16, depth=1, heads=2, segment=8, segments=2, rows=1, memory=8, tokens=2)
    return ModelSizes(vocabulary=8192, width=1024, depth=8, heads=16, segment=512, rows=8, memory=512)


def language_work(sizes: ModelSizes) -> str:
    """Describe a training step of a language model."""
    return f"training step, {sizes.rows} rows of {sizes.segments} x {sizes.segment} tokens, width {sizes.width}"


def _memory_peer(name: str, sizes: ModelSizes, device: str, dtype: torch.dtype) -> Call:
    try:
        with scratch_folder():
            peer = PEERS[name].build(sizes)
    except ModuleNotFoundError as error:
        raise Unavailable(lacking(PEERS[name].distribution, error)) from error
    return memories.peer_step(name, peer, sizes, device, dtype)


def vision_part(device: str, quick: bool) -> Iterator[CaseGroup]:
    """Image models with GRC next to the plain ones: a training step, and inference with folded caches."""
    side, batch = (32, 1) if quick else (224, 64)
    for name in ("PVT-Tiny",) if quick else IMAGE_MODELS:
        for dtype in DTYPES:
            for work in ("training step", "inference"):
                make = partial(_image_model, name, work=work, side=side, batch=batch, device=device, dtype=dtype)
                cases = {case: BenchmarkCase(partial(make, case)) for case in ("plain", "GRC")}
                yield CaseGroup("vision", f"{name}, {work}, {batch} images of {side} x {side}", dtype, cases)


def _image_model(
    name: str, case: str, compiled: bool = False, *, work: str, side: int, batch: int, device: str, dtype: torch.dtype
) -> Call:
    model = build_backbones(MODELS[name], side, [case])[case].to(device)
    images, labels = image_batch(batch, side, device)
    called: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]

    def forward() -> Tensor:
        with precision(device, dtype):
            return called(images)  # type: ignore[no-any-return]

    def loss() -> Tensor:
        with precision(device, dtype):
            return F.cross_entropy(called(images), labels)

    if work == "training step":
        return training_step(model, loss)
    fold_caches(model)
    return torch.no_grad()(forward)


def generation_part(device: str, quick: bool) -> Iterator[CaseGroup]:
    """Generation with and without a memory, next to GPT-2 and x-transformers with their caches."""
    sizes = language_sizes(quick)
    for rows in (1,) if quick else (1, 32):
        setting = generation.GenerationSetting(rows, *((8, 3, 10) if quick else (512, 64, 256)))
        for dtype in DTYPES:

            def ours(name: str, setting: Any = setting, dtype: Any = dtype) -> Call:
                model = generation.build(name, sizes, setting).to(device, dtype)
                return generation.our_writer(model, sizes, setting, device)

            def theirs(name: str, setting: Any = setting, dtype: Any = dtype) -> Call:
                try:
                    return generation.peer_writer(name, sizes, setting, device, dtype)[1]
                except ImportError as error:
                    raise Unavailable(lacking(generation.PEERS[name].distribution, error)) from error

            cases = {name: BenchmarkCase(partial(theirs, name)) for name in generation.PEERS}
            cases |= {n: BenchmarkCase(partial(ours, n)) for n in (generation.NO_MEMORY, *generation.STANDARD)}
            yield CaseGroup("generation", f"{setting}, width {sizes.width}", dtype, cases)


def compiled_part(device: str, quick: bool) -> Iterator[CaseGroup]:
    """Training steps through torch.compile next to the eager form: language models with a memory, image models."""
    dtype, sizes = torch.bfloat16, language_sizes(quick)

    def language(name: str | None, compiled: bool) -> Call:
        wrap: Any = torch.compile if compiled else lambda model: model
        return memories.our_step(name, sizes, device, dtype, wrap=wrap)

    names = (None,) if quick else (None, *generation.STANDARD)
    works: dict[str, dict[str, Callable[[bool], Call]]] = {
        language_work(sizes): {name or "no memory": partial(language, name) for name in names}
    }
    side, batch = 224, 64
    options: dict[str, Any] = {"work": "training step", "side": side, "batch": batch, "device": device, "dtype": dtype}
    for model in () if quick else IMAGE_MODELS:
        makers = {case: partial(_image_model, model, case, **options) for case in ("plain", "GRC")}
        works[f"{model}, training step, {batch} images of {side} x {side}"] = dict(makers)
    for work, forms in works.items():
        cases = {}
        for case, make in forms.items():
            cases[case] = BenchmarkCase(partial(make, False))
            cases[f"{case}, compiled"] = BenchmarkCase(partial(make, True), like=case)
        yield CaseGroup("compiled", work, dtype, cases)


PARTS: dict[str, Part] = {
    "attentions": attention_part,
    "memories": memory_part,
    "vision": vision_part,
    "generation": generation_part,
    "compiled": compiled_part,
}
"""Parts in the order of running; the last gets the time left over."""


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
