"""Every stream memory as a language model of one size: training and streaming speed, kept activations, state.

They stand beside the same model without a memory, and beside the published implementation of the same memory where one
is installed (`peers`). A training step reads all segments of a batch, with the gradient across segments where the paper
has one. Streaming is the same without gradient.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import count_parameters, flops_of, saved_activation_bytes
from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.experiments.reports.markdown import table
from cached_transformers import state as states
from cached_transformers.integrations.models import create_model
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import MemorySpec
from cached_transformers.models.segments import read_segments

from .interleaved import Ratio, compare, precision, training_step
from .peers import PEERS, Peer, Sizes, detached, lacking, random_tokens, scratch_folder
from .profiled import operators

OPTIONS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "armt": lambda s: {"length": s.tokens},
    "block_recurrent": lambda s: {"length": s.segment},
    "compressive": lambda s: {"length": s.memory, "compressed": s.memory // s.rate, "rate": s.rate},
    "crtn": lambda s: {"segment": s.segment, "regions": 4, "topk": 1},
    "ernie_doc": lambda s: {"length": s.memory, "relative": False},
    "expire_span": lambda s: {"length": s.memory, "relative": False},
    "feedback": lambda s: {"length": s.memory},
    "grc_stream": lambda s: {"length": s.segment},
    "h2o": lambda s: {"length": s.memory // 2, "heavy": s.memory // 2, "relative": False},
    "infini": lambda s: {"update": "delta"},
    "infinity_former": lambda s: {"length": s.memory, "chunk": s.segment, "relative": False},
    "memformer": lambda s: {"length": s.tokens},
    "memorizing": lambda s: {"length": s.store, "k": s.neighbours},
    "memory_caching": lambda s: {"slots": max(1, s.memory // s.segment)},
    "memory_transformer": lambda s: {"length": s.tokens},
    "rmt": lambda s: {"length": s.tokens},
    "segatron": lambda s: {"length": s.memory},
    "streaming_llm": lambda s: {"length": s.memory - 4, "relative": False},
    "titans": lambda s: {"chunk": s.chunk},
    "tova": lambda s: {"length": s.memory, "relative": False},
    "transformer_xl": lambda s: {"length": s.memory, "relative": False},
}
"""Sizes of the memories that have a say in it; others keep their defaults."""
ACROSS = frozenset(
    {
        *("armt", "block_recurrent", "grc_stream", "infini", "lact", "memformer", "memory_caching", "read_twice"),
        *("rmt", "titans", "ttt"),
    }
)
"""Memories through whose state the gradient flows; the others are cut after every segment, as they cut themselves."""


@dataclass(frozen=True)
class Row:
    """Measurements of one memory; speeds in tokens a second of processor time.

    `plain` is the time of a training step over that of the model without a memory, `flops` the same of counted
    operations, and `overhead` the one by the other: what a step costs beyond its products. `peer` is the time of the
    peer's step over that of ours, made like the peer where `peer_name` says so: above 1 ours is faster. `peer_name` of
    a peer that could not be measured says why.
    """

    memory: str
    parameters: int
    train_speed: float
    plain: Ratio
    flops: float
    stream_speed: float
    activations_mib: float
    state_kib: float
    peer: Ratio | None
    peer_name: str
    peer_parameters: int | None

    @property
    def overhead(self) -> float:
        """Ratio of times by ratio of operations; 1 where all that is not a product were free."""
        return self.plain.median / self.flops


def spec(memory: str, sizes: Sizes) -> dict[str, Any]:
    """The memory with its options at these sizes."""
    return {"name": memory, **OPTIONS.get(memory, lambda s: {})(sizes)}


def build(memory: MemorySpec, sizes: Sizes, **options: Any) -> nn.Module:
    """The language model that is measured."""
    torch.manual_seed(0)
    return create_model(
        "language_model",
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        feed_forward=4 * sizes.width,
        memory=memory,
        **options,
    )


def our_step(
    model: nn.Module, sizes: Sizes, tokens: Tensor, bptt: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """One optimiser step over all segments, with the state of the step before, as in training on a stream."""
    loop = SegmentLoop(model, sizes.segment, bptt=bptt)
    state: Any = None

    def mean_loss() -> Tensor:
        nonlocal state
        with precision(tokens.device.type, dtype):
            loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        return loss

    return training_step(model, mean_loss)


def peer_step(
    peer: Peer, sizes: Sizes, tokens: Tensor, bptt: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """The same of a peer."""
    memory: Any = None

    def mean_loss() -> Tensor:
        nonlocal memory
        if peer.whole:
            with precision(tokens.device.type, dtype):
                return peer.read(tokens[:, :-1], tokens[:, 1:], None)[0]
        losses = []
        for index in range(sizes.segments):
            begin = index * sizes.segment
            if index % bptt == 0:
                memory = detached(memory)
            inputs, targets = (tokens[:, begin + k : begin + k + sizes.segment] for k in (0, 1))
            with precision(tokens.device.type, dtype):
                loss, memory = peer.read(inputs, targets, memory)
            losses.append(loss)
        return torch.stack(losses).mean()

    return training_step(peer.module, mean_loss)


def streaming(model: nn.Module, sizes: Sizes, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """All segments without gradient, the state carried on."""
    state: Any = None

    def read(segment_BN: Tensor, before: Any, reset_B: Tensor | None) -> ModelOutput:
        return model(segment_BN, before)  # type: ignore[no-any-return]

    def run() -> None:
        nonlocal state
        model.eval()
        with torch.no_grad(), precision(tokens.device.type, dtype):
            for out in read_segments(read, tokens[:, :-1].split(sizes.segment, 1), state):
                state = out.state

    return run


def measure(memory: str, sizes: Sizes, rounds: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Row:
    """All that is measured of one memory."""
    model, tokens = build(spec(memory, sizes), sizes).to(device), random_tokens(sizes).to(device)
    bptt = sizes.segments if memory in ACROSS else 1
    plain = build(None, sizes).to(device)
    cases = {"ours": our_step(model, sizes, tokens, bptt, dtype), "plain": our_step(plain, sizes, tokens, 1, dtype)}
    peer, peer_name = _peer(memory, sizes)
    train = compare(cases, "ours", rounds)
    if peer is not None:
        like = build(spec(memory, sizes), sizes, **PEERS[memory].like).to(device)
        peer_name += "".join(f", ours with {name}={value}" for name, value in PEERS[memory].like.items())
        both = {"ours": our_step(like, sizes, tokens, bptt, dtype)}
        both["peer"] = peer_step(peer._replace(module=peer.module.to(device)), sizes, tokens, bptt, dtype)
        train["peer"] = compare(both, "ours", rounds)["peer"]
    flops = flops_of(cases["ours"]) / flops_of(cases["plain"])  # of steps that find a state
    stream = compare({"ours": streaming(model, sizes, tokens, dtype)}, "ours", rounds)["ours"]
    loop = SegmentLoop(model.train(), sizes.segment, bptt=bptt)
    kept = saved_activation_bytes(lambda: loop(tokens[:, :-1], tokens[:, 1:])[0], model, tokens)
    per_step = sizes.tokens_per_step
    seconds = train["ours"].seconds
    return Row(
        memory,
        count_parameters(model),
        per_step / seconds,
        _inverse(train["plain"]),
        flops,
        per_step / stream.seconds,
        kept / 2**20,
        states.nbytes(model.init_state(1)) / 2**10,  # type: ignore[operator]
        train.get("peer"),
        peer_name,
        count_parameters(peer.module) if peer is not None else None,
    )


def _inverse(ratio: Ratio) -> Ratio:
    return dataclasses.replace(ratio, median=1 / ratio.median, low=1 / ratio.high, high=1 / ratio.low)


def _peer(memory: str, sizes: Sizes) -> tuple[Peer | None, str]:
    """The peer and its name, or None and what it lacks; both empty where there is none."""
    if memory not in PEERS:
        return None, ""
    name = PEERS[memory].distribution
    try:
        return PEERS[memory].build(sizes), name
    except ModuleNotFoundError as error:
        return None, lacking(name, error)


def run(rounds: int, only: str = "all", device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Row]:
    """Measure every stream memory, or those named in `only` (by commas); under autocast if `dtype` is not float32."""
    names = stream_memories() if only == "all" else only.split(",")
    with warnings.catch_warnings(), scratch_folder():
        warnings.simplefilter("ignore")  # of the peers
        return [measure(name, Sizes(), rounds, device, dtype) for name in names]


def profile(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """Where the time of a training step goes, with one memory or with none ("none"), as Markdown."""
    sizes = Sizes()
    model = build(None if name == "none" else spec(name, sizes), sizes).to(device)
    step = our_step(model, sizes, random_tokens(sizes).to(device), sizes.segments if name in ACROSS else 1, dtype)
    return f"a training step, memory {name}:\n\n{operators(step, device)}"


def as_markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = (
        "memory | parameters (M) | training (tokens/s) | step, no memory = 1 | its FLOPs | overhead | "
        "streaming (tokens/s) | "
        "kept activations (MiB) | state a row (KiB) | peer's step, ours = 1 | peer"
    )
    lines = []
    for r in rows:
        peer, name = "", r.peer_name
        if r.peer is not None:
            peer, name = str(r.peer), f"{r.peer_name} ({(r.peer_parameters or 0) / 1e6:.2f} M)"
        lines.append(
            [
                r.memory,
                f"{r.parameters / 1e6:.2f}",
                f"{r.train_speed:,.0f}",
                str(r.plain),
                f"{r.flops:.3f}x",
                f"{r.overhead:.2f}",
                f"{r.stream_speed:,.0f}",
                f"{r.activations_mib:.0f}",
                f"{r.state_kib:,.1f}",
                peer,
                name,
            ]
        )
    return table(head.split(" | "), lines)
