"""Every stream memory as a language model of one size: training and streaming speed, kept activations, state.

Each is compared with the same model without a memory, and with an installed published implementation. A training step
reads all segments of a batch, with the gradient across segments if the paper has one. Streaming is the same without
gradient.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.memory_peers import PEERS, ModelSizes, Peer, lacking, scratch_folder
from cached_lab.experiments.costs.flops import count_parameters, flops_of, saved_activation_bytes
from cached_lab.experiments.costs.timing import compare, precision, training_step
from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers import state as states
from cached_transformers.integrations.models import create_model
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import MemorySpec
from cached_transformers.models.segments import read_segments

OPTIONS: dict[str, Callable[[ModelSizes], dict[str, Any]]] = {
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
    "segatron": lambda s: {"length": s.memory, "sentence_ends": tuple(range(16)), "paragraph_ends": (0, 1)},
    "streaming_llm": lambda s: {"length": s.memory - 4, "relative": False},
    "titans": lambda s: {"chunk": s.chunk},
    "tova": lambda s: {"length": s.memory, "relative": False},
    "transformer_xl": lambda s: {"length": s.memory, "relative": False},
}
"""Options that depend on the sizes; other memories keep their defaults."""
ACROSS = frozenset(
    {
        *("armt", "block_recurrent", "grc_stream", "infini", "lact", "memformer", "memory_caching", "read_twice"),
        *("rmt", "titans", "ttt"),
    }
)
"""Memories with a gradient through their state; other states are detached after every segment."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memories", default="all", help="names separated by commas (default: all)")
    command.add_dtype(parser, "of autocast")


def measure(options: argparse.Namespace) -> command.Result:
    device, dtype = options.device, command.dtype_of(options)
    names = stream_memories() if options.memories == "all" else options.memories.split(",")
    with warnings.catch_warnings(), scratch_folder():
        warnings.simplefilter("ignore")  # from the peers
        rows = [measure_memory(name, ModelSizes(), options.rounds, device, dtype) for name in names]
    return command.Result(rows, as_markdown(rows), {"dtype": options.dtype})


def spec(memory: str, sizes: ModelSizes) -> dict[str, Any]:
    """Return the memory with its options at these sizes."""
    return {"name": memory, **OPTIONS.get(memory, lambda s: {})(sizes)}


def build(memory: MemorySpec, sizes: ModelSizes, **options: Any) -> nn.Module:
    """Build the language model."""
    torch.manual_seed(0)
    shape = {"width": sizes.width, "depth": sizes.depth, "heads": sizes.heads, "feed_forward": 4 * sizes.width}
    return create_model("language_model", vocabulary=sizes.vocabulary, **shape, memory=memory, **options)


def host(architecture: str, sizes: ModelSizes, length: int, memory: MemorySpec = None) -> nn.Module:
    """Build GPT-2 or Llama of transformers with fused attention and positions for `length` tokens."""
    torch.manual_seed(0)
    shape = {"hidden_size": sizes.width, "num_hidden_layers": sizes.depth, "num_attention_heads": sizes.heads}
    shape |= {"intermediate_size": 4 * sizes.width, "max_position_embeddings": length}  # GPT-2 knows these names, too
    model = {"vocabulary": sizes.vocabulary, "architecture": architecture, "memory": memory}
    return create_model("transformers", **model, **shape, bos_token_id=None, eos_token_id=None)


def random_tokens(sizes: ModelSizes) -> Tensor:
    """Return token ids (rows, segments * segment + 1), the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.segments * sizes.segment + 1), generator=generator)


def our_step(
    memory: str | None, sizes: ModelSizes, device: str, dtype: torch.dtype, model: nn.Module | None = None
) -> Callable[[], None]:
    """Return an optimiser step over all segments, starting from the last step's state, as in training on a stream."""
    if model is None:
        model = build(None if memory is None else spec(memory, sizes), sizes).to(device)
    loop = SegmentLoop(model, sizes.segment, bptt=sizes.segments if memory in ACROSS else 1)
    tokens, state = random_tokens(sizes).to(device), None

    def mean_loss() -> Tensor:
        nonlocal state
        with precision(device, dtype):
            loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        return loss

    return training_step(model, mean_loss)


def peer_step(memory: str, peer: Peer, sizes: ModelSizes, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """Return the same step of a peer."""
    peer.module.to(device)
    tokens, state = random_tokens(sizes).to(device), None

    def mean_loss() -> Tensor:
        nonlocal state
        losses = []
        with precision(device, dtype):
            if peer.whole:
                return peer.loss(tokens[:, :-1], tokens[:, 1:], None)[0]
            for index in range(sizes.segments):
                begin = index * sizes.segment
                if index == 0 or memory not in ACROSS:
                    state = detached(state)
                inputs, targets = (tokens[:, begin + k : begin + k + sizes.segment] for k in (0, 1))
                loss, state = peer.loss(inputs, targets, state)
                losses.append(loss)
        return torch.stack(losses).mean()

    return training_step(peer.module, mean_loss)


def detached(memory: Any) -> Any:
    """Detach the memory of a peer: a tensor, or tuples and lists of tensors."""
    if isinstance(memory, Tensor):
        return memory.detach()
    if isinstance(memory, tuple) and hasattr(memory, "_fields"):
        return type(memory)(*(detached(part) for part in memory))
    if isinstance(memory, list | tuple) and all(isinstance(m, Tensor | list | tuple) for m in memory):
        return type(memory)(detached(part) for part in memory)
    return memory


def measure_memory(
    memory: str, sizes: ModelSizes, rounds: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> command.Measurement:
    """Measure one memory.

    `plain` is the time of a training step over that of the model without a memory, `flops` the ratio of their counted
    operations. `peer` is the time of the peer's step over that of ours with the peer's options: above 1 ours is faster.
    """
    model = build(spec(memory, sizes), sizes).to(device)
    ours, plain = our_step(memory, sizes, device, dtype, model), our_step(None, sizes, device, dtype)
    peer, peer_name, beside = None, "", None
    if memory in PEERS:
        published = PEERS[memory]
        peer_name = published.distribution
        try:
            peer = published.build(sizes)
        except ModuleNotFoundError as error:
            peer_name = lacking(peer_name, error)
    train = compare({"ours": ours, "plain": plain}, "plain", rounds)["ours"]
    if peer is not None:
        peer_name += "".join(f", ours with {name}={value}" for name, value in published.like.items())
        like = build(spec(memory, sizes), sizes, **published.like).to(device)
        both = {"ours": our_step(memory, sizes, device, dtype, like)}
        both["peer"] = peer_step(memory, peer, sizes, device, dtype)
        beside = compare(both, "ours", rounds)["peer"]
    flops = flops_of(ours) / flops_of(plain)  # of steps that start from a state
    tokens = random_tokens(sizes).to(device)
    stream = compare({"ours": streaming(model, sizes, tokens, dtype)}, "ours", rounds)["ours"]
    loop = SegmentLoop(model.train(), sizes.segment, bptt=sizes.segments if memory in ACROSS else 1)
    kept = saved_activation_bytes(lambda: loop(tokens[:, :-1], tokens[:, 1:])[0], model, tokens)
    per_step = sizes.rows * sizes.segment * sizes.segments
    return {
        "memory": memory,
        "parameters": count_parameters(model),
        "train_speed": per_step / train.seconds,
        "plain": train,
        "flops": flops,
        "overhead": train.median / flops,
        "stream_speed": per_step / stream.seconds,
        "activations_mib": kept / 2**20,
        "state_kib": states.nbytes(model.init_state(1)) / 2**10,  # type: ignore[operator]
        "peer": beside,
        "peer_name": peer_name,
        "peer_parameters": None if peer is None else count_parameters(peer.module),
    }


def streaming(model: nn.Module, sizes: ModelSizes, tokens: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Return a pass over all segments without gradient, which carries the state on."""
    state: Any = None

    def run() -> None:
        nonlocal state
        model.eval()
        parts = tokens[:, :-1].split(sizes.segment, 1)
        with torch.no_grad(), precision(tokens.device.type, dtype):
            for out in read_segments(lambda segment_BN, before, reset_B: model(segment_BN, before), parts, state):
                state = out.state

    return run


@torch.no_grad()
def read(model: nn.Module, ids_BN: Tensor, segment: int, state: states.State = None) -> states.State:
    """Return the state after the segments of a text, with logits of last tokens alone; keep the given state."""
    state = model.init_state(len(ids_BN)) if state is None else states.seal(state)  # type: ignore[operator]
    parts = ids_BN.split(segment, 1)
    for out in read_segments(lambda part_BN, s, _: model(part_BN, s, last_only=True), parts, state, in_place=True):
        state = out.state
    return state


def as_markdown(rows: list[command.Measurement]) -> str:
    """Write the rows as a Markdown table."""

    def peer(row: command.Measurement) -> str:
        return row["peer_name"] + (f" ({row['peer_parameters'] / 1e6:.2f} M)" if row["peer_parameters"] else "")

    columns: dict[str, Callable[[command.Measurement], str]] = {
        "memory": lambda row: row["memory"],
        "parameters (M)": lambda row: f"{row['parameters'] / 1e6:.2f}",
        "training (tokens/s)": lambda row: f"{row['train_speed']:,.0f}",
        "step, no memory = 1": lambda row: str(row["plain"]),
        "its FLOPs": lambda row: f"{row['flops']:.3f}x",
        "overhead": lambda row: f"{row['overhead']:.2f}",
        "streaming (tokens/s)": lambda row: f"{row['stream_speed']:,.0f}",
        "kept activations (MiB)": lambda row: f"{row['activations_mib']:.0f}",
        "state a row (KiB)": lambda row: f"{row['state_kib']:,.1f}",
        "peer's step, ours = 1": lambda row: "" if row["peer"] is None else str(row["peer"]),
        "peer": peer,
    }
    return command.columns_table(rows, columns)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
