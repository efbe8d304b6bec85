"""Read a text once with a language model, to score output caches or to build a datastore.

Many settings of one cache are scored in one pass: they find the same entries and weigh them differently. Only the
targets' share of p_cache is computed.

Legend: B rows, N tokens of a segment, D width of a key, C settings of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from cached_lab.data.text import TextDataset
from cached_lab.tasks.language.scores import check_passes, evaluation_streams, segment_length
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.metrics import untouched
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import SegmentLoop, token_losses
from cached_transformers.state import State, last_use
from cached_transformers.state import reset as reset_rows

from .datastore import build
from .hidden_states import HiddenStates, hidden_states
from .output_cache import OutputCache

Scores: TypeAlias = Literal["losses", "sums", "none"]
"""Required scores: losses of the targets; losses and log-sum-exp of the logits; or none."""


class ReadSegment(NamedTuple):
    """One segment of some rows.

    Attributes:
        losses_BN: nats; 0 where there is no target, or losses are not required.
        state: of the model after the segment.
        h_BND: hidden states. next_BN: targets, -100 at padding.
        lse_BN: log-sum-exp of the model's logits; 0 where it is not required.
        reset_B: rows that were reset before the segment.
    """

    losses_BN: Tensor
    state: State
    h_BND: Tensor
    next_BN: Tensor
    lse_BN: Tensor
    reset_B: Tensor | None = None


def read_split(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig, seen: HiddenStates, scores: Scores
) -> Iterator[ReadSegment]:
    """Read a whole split in order, every token once, in the rows of an evaluation, sharded over the processes.

    Raises:
        ValueError: documents are packed.
    """
    if dataset.reset == "packed":
        raise ValueError("data.reset=packed: documents of one segment would share a cache; take data.reset=document")
    check_passes(model, config.training.passes)
    streams, length = evaluation_streams(dataset, config), segment_length(config)
    rows = slice(*(rank * streams.rows // world.size for rank in (world.rank, world.rank + 1)))
    state: State | None = None

    def scoring(model: nn.Module, inputs_BN: Tensor, targets_BN: Tensor, *more: Any) -> ReadSegment:
        losses_BN, lse_BN, after = _scores(model, inputs_BN, targets_BN, scores, *more)
        return ReadSegment(losses_BN, after, seen.take(), targets_BN, lse_BN)

    loop = SegmentLoop(model, length, passes=config.training.passes, scoring=scoring)  # type: ignore[arg-type]
    for step in range(streams.steps if rows.stop > rows.start else 0):
        inputs_BN, targets_BN, reset, padding_BN = streams.batch(step, rows).moved(world.device)
        with last_use(state if config.training.passes == 1 else None):
            outs: list[Any] = list(loop.read(inputs_BN, targets_BN, state, reset, padding_BN))
        state = outs[-1].state
        for place, out in enumerate(outs):
            yield out._replace(reset_B=reset[:, place]) if place < reset.shape[1] else out


def _scores(
    model: nn.Module,
    inputs_BN: Tensor,
    targets_BN: Tensor,
    scores: Scores,
    state: State | None = None,
    reset_B: Tensor | None = None,
    padding_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Losses, log-sum-exp of the logits, and the state after the segment; zeros for scores that are not required."""
    none_BN = torch.zeros_like(targets_BN, dtype=torch.float32)
    if scores == "losses":
        losses_BN, after, _ = token_losses(model, inputs_BN, targets_BN, state, reset_B, padding_BN)
        return losses_BN, none_BN, after
    more: dict[str, Any] = {} if reset_B is None else {"reset": reset_B}
    if scores == "none" and hasattr(model, "stack") and getattr(model, "scores_last", False):
        more["last_only"] = True  # hidden states are read before the head
    logits_BNV, after, _ = model(inputs_BN, state, padding=padding_BN, **more)
    if scores == "none":
        return none_BN, none_BN, after
    logits_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    lse_BN = logits_BNV.logsumexp(-1)
    target_BN = logits_BNV.gather(2, targets_BN.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets_BN != IGNORED, lse_BN - target_BN, 0), lse_BN, after


def cache_losses(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig, settings: Sequence[OutputCache]
) -> tuple[Tensor, float]:
    """Summed losses (nats) of a split, (C + 1,) float64, without a cache and with each setting; number of tokens.

    Rows begin with an empty cache and, by `data.reset`, each document does.

    Args:
        settings: of one cache, which find the same entries.
    """
    cache = settings[0]
    joint = any(getattr(setting, "form", "linear") == "joint" for setting in settings)
    by_sharpness: dict[float, list[int]] = {}
    for index, setting in enumerate(settings, 1):
        by_sharpness.setdefault(setting.sharpness, []).append(index)
    nats = torch.zeros(len(settings) + 1, dtype=torch.float64, device=world.device)
    tokens = torch.zeros((), dtype=torch.float64, device=world.device)
    state: State | None = None
    with untouched(model), hidden_states(model, cache.key) as seen:
        for read in read_split(model, dataset, world, config, seen, "sums" if joint else "losses"):
            if state is None:
                state = cache.init_state(len(read.h_BND), read.h_BND)
            elif read.reset_B is not None and bool(read.reset_B.any()):
                state = reset_rows(state, cache.init_state(len(read.h_BND), read.h_BND), read.reset_B)
            known_BN = read.next_BN != IGNORED
            nats[0] += read.losses_BN[known_BN].double().sum()
            tokens += known_BN.sum()
            found = cache.find(state, read.h_BND, read.next_BN)
            for sharpness, indices in by_sharpness.items():
                weight_BNK, lse_BN = found.weights(sharpness)
                copied_BN = (weight_BNK * (found.token_BNK == read.next_BN[..., None])).sum(-1)
                for index in indices:
                    log_cache_BN, log_model_BN = settings[index - 1].gate(lse_BN, read.lse_BN)
                    logp_BN = torch.logaddexp(log_model_BN - read.losses_BN, log_cache_BN + copied_BN.log())
                    nats[index] -= logp_BN[known_BN].double().sum()
            with last_use(state):
                state = cache.write(state, read.h_BND, read.next_BN)
    return world.sum(nats).cpu(), float(world.sum(tokens))


def build_datastore(
    folder: Path, model: nn.Module, dataset: TextDataset, device: torch.device, config: RunConfig, about: dict[str, Any]
) -> None:
    """Write keys and values of all contexts of a split by `datastore.build`; `about["key"]` names the hidden states."""
    with untouched(model), hidden_states(model, about["key"]) as seen:

        def pieces() -> Iterator[tuple[Tensor, Tensor]]:
            for read in read_split(model, dataset, World(device), config, seen, "none"):
                known_BN = read.next_BN != IGNORED
                yield read.h_BND[known_BN], read.next_BN[known_BN]

        build(folder, pieces(), about)
