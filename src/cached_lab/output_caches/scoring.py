"""Read a text once with a language model, to score output caches or to build a datastore.

Many settings of one cache are scored in one pass: they find the same entries and weigh them differently. Only the
targets' share of p_cache is computed.

Legend: B rows, N tokens of a segment, D width of a key, C settings of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from cached_lab.data.samples import digest_of
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.data.text import TextDataset
from cached_lab.tasks.language.scores import evaluation_streams, own_rows, read_rows, segment_length
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.metrics import untouched
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.state import State, fingerprint, last_use
from cached_transformers.state import reset as reset_rows

from .hidden_states import hidden_states
from .knn_lm import Datastore
from .output_cache import OutputCache


def read_split(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig, key: str
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Read a whole split in order, every token once, in the rows of an evaluation, sharded over the processes.

    Yields of each segment: losses (B, N) in nats, 0 at padding; hidden states (B, N, D); targets (B, N), -100 at
    padding; and the rows (B,) that were reset before it, on the CPU.

    Args:
        key: the hidden states, by their name in `hidden_states`.

    Raises:
        ValueError: documents are packed, or several passes.
    """
    if dataset.reset == "packed":
        raise ValueError("data.reset=packed: documents of one segment would share a cache; take data.reset=document")
    if config.training.passes > 1:
        raise ValueError(f"training.passes={config.training.passes} does not go with an output cache; take a run of 1")
    streams = evaluation_streams(dataset, config)
    with untouched(model), hidden_states(model, key) as seen:
        for batch, losses_BN in read_rows(model, streams, own_rows(streams, world), world, config):
            h_BND = seen.take(losses_BN.shape[1])
            yield losses_BN, h_BND, batch.targets.to(world.device), batch.reset[:, 0]


def cache_losses(
    model: nn.Module, dataset: TextDataset, world: World, config: RunConfig, settings: Sequence[OutputCache]
) -> tuple[Tensor, float]:
    """Summed losses (nats) of a split, (C + 1,) float64, without a cache and with each setting; number of tokens.

    Rows begin with an empty cache and, by `data.reset`, each document does.

    Args:
        settings: of one cache, which find the same entries.
    """
    cache = settings[0]
    by_sharpness: dict[float, list[int]] = {}
    for index, setting in enumerate(settings, 1):
        by_sharpness.setdefault(setting.sharpness, []).append(index)
    nats = torch.zeros(len(settings) + 1, dtype=torch.float64, device=world.device)
    tokens = torch.zeros((), dtype=torch.float64, device=world.device)
    state: State | None = None
    for losses_BN, h_BND, next_BN, reset_B in read_split(model, dataset, world, config, cache.key):
        if state is None:
            state = cache.init_state(len(h_BND), h_BND)
        elif reset_B.any():
            state = reset_rows(state, cache.init_state(len(h_BND), h_BND), reset_B.to(world.device))
        known_BN = next_BN != IGNORED
        nats[0] += losses_BN[known_BN].double().sum()
        tokens += known_BN.sum()
        found = cache.find(state, h_BND, next_BN)
        for sharpness, indices in by_sharpness.items():
            copied_BN = (found.weights(sharpness) * (found.token_BNK == next_BN[..., None])).sum(-1)
            for index in indices:
                logp_BN = found.mixed(-losses_BN, copied_BN, settings[index - 1].lambda_)
                nats[index] -= logp_BN[known_BN].double().sum()
        with last_use(state):
            state = cache.write(state, h_BND, next_BN)
    return world.sum(nats).cpu(), float(world.sum(tokens))


def build_datastore(
    model: nn.Module, train: TextDataset, world: World, config: RunConfig, key: str, dtype: str
) -> Datastore:
    """The datastore of all contexts of a split, from the data cache or built by the main process.

    Args:
        key: the hidden states, by their name in `hidden_states`. dtype: of the stored keys, "float16" or "float32".

    Raises:
        ValueError: a key is out of the range of its dtype.
    """

    def build() -> Arrays:
        keys, values = [], []
        for _, h_BND, next_BN, _ in read_split(model, train, World(world.device), config, key):
            known_BN = next_BN != IGNORED
            keys.append(h_BND[known_BN].to(getattr(torch, dtype)).cpu().numpy())
            values.append(next_BN[known_BN].int().cpu().numpy())
            if not np.isfinite(keys[-1]).all():
                raise ValueError(f"a key is not finite in dtype={dtype}; take knn.dtype=float32, or check the model")
        return {"keys": np.concatenate(keys), "values": np.concatenate(values)}

    about = {"model": fingerprint(model), "text": digest_of(train.samples()), "length": segment_length(config)}
    about |= {"key": key, "dtype": dtype, "rows": config.training.evaluation_rows, "memory": config.evaluation.memory}
    if world.main:
        load_or_build("datastore", about, build)
    world.barrier()
    arrays = load_or_build("datastore", about, build)
    return Datastore(torch.from_numpy(arrays["keys"]), torch.from_numpy(arrays["values"]), key)
