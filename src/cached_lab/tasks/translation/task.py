"""Sequence to sequence: batches of pairs, a loss per target token, and translations scored by BLEU.

This task serves every data set with `task = "translation"`, whose items are `Pair`s. Data with `lengths` can be batched
by tokens; data with `texts` (sources and references) are translated and scored; other data, such as damaged text, are
scored by their loss.

Legend: B rows, N source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_lab.data.pairs import PairBatch
from cached_lab.data.subwords import BEGIN, END
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.loader import TrainingOrder, evaluation_batches, to_device
from cached_lab.training.metrics import untouched
from cached_lab.training.run_files import TRANSLATIONS
from cached_lab.training.settings import EvaluationConfig
from cached_lab.training.task import Arguments, Task, sums_of
from cached_transformers.layers.token_loss import IGNORED, perplexity

from .scores import RESAMPLES, corpus_scores
from .token_batches import TokenOrder
from .translate import translate


class PairPiece(NamedTuple):
    """A piece of a batch, and the number of target tokens in all pieces and processes of the batch."""

    pairs: PairBatch
    tokens: float


class TranslatedRow(NamedTuple):
    """A sentence with its reference, translation and log-probability."""

    source: str
    reference: str
    hypothesis: str
    score: float


class TranslationTask(Task):
    """Sequence-to-sequence training; all target tokens of a step have equal weights, in any piece or process.

    Attributes:
        translations: of the last scored split, on the main process.

    Raises:
        ValueError: settings or a model unfit for pairs.
    """

    width = 3
    dynamic = True

    def __init__(self, config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> None:
        super().__init__(config, model, train, validation, world)
        check(config, model, train)
        settings = self.settings
        self.order: TokenOrder | TrainingOrder
        if settings.batch_tokens is None:
            self.order = TrainingOrder(len(train), settings.batch_size, settings.seed, 0, self.share)
        else:
            self.order = TokenOrder(train.lengths, settings.batch_tokens, settings.seed, 0, self.share)
        self.translations: list[TranslatedRow] = []

    def facts(self) -> dict[str, float]:
        """Return the steps of an epoch of token batches."""
        return {"steps_per_epoch": self.order.batches} if isinstance(self.order, TokenOrder) else {}

    def batches(self, step: int) -> Iterator[PairPiece]:
        loaded = self._loaded(self.order, step)
        while True:
            pairs = [next(loaded) for _ in range(self.settings.accumulate)]
            if isinstance(self.order, TokenOrder):
                for piece, batch in enumerate(pairs):
                    if self.order.empty(step, piece):
                        pairs[piece] = batch._replace(targets=torch.full_like(batch.targets, IGNORED))
            mine = sum(int((batch.targets != IGNORED).sum()) for batch in pairs)
            tokens = float(self.world.sum(torch.tensor(float(mine))))
            yield from (PairPiece(batch, tokens) for batch in pairs)
            step += 1

    def backward(self, runner: Callable[..., Any], batch: PairPiece, scaler: torch.amp.GradScaler) -> Tensor:
        pairs = to_device(batch.pairs, self.world.device)
        with self.settings.autocast(self.world.device):
            output = runner(
                pairs.inputs,
                pairs.decoder_inputs,
                padding=pairs.padding,
                targets=pairs.targets,
                label_smoothing=self.settings.label_smoothing,
            )
        nats, count = output.outputs.sum(), (pairs.targets != IGNORED).sum()
        # Gradients are averaged over processes, so each scales its share of the batch by their number.
        share = self.world.size / batch.tokens
        loss = nats * share
        if output.auxiliary_loss is not None:
            loss = loss + output.auxiliary_loss * (count * share)
        scaler.scale(loss).backward()
        sources = (~pairs.padding).sum() * (count > 0)  # a piece without targets only fills up the batch
        return sums_of(loss, nats, sources, count)

    def averages(self, total: Tensor) -> dict[str, float]:
        """Return loss per target token (with label smoothing, if any), and the tokens of both sides."""
        nats, sources, targets = total.tolist()
        loss = nats / targets
        values = {"loss": loss} if self.settings.label_smoothing else {"loss": loss, "perplexity": perplexity(loss)}
        return {**values, "tokens": sources + targets}

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[dict[str, Any], list[dict[str, float]]]:
        """Return loss and perplexity, and scores of translations of test or the `bleu_sentences` of validation."""
        sentences = self.config.evaluation.bleu_sentences if dataset.split == "validation" else None
        values, self.translations = evaluate_pairs(model, dataset, self.world, self.config, sentences)
        return values, []

    @classmethod
    def arguments(cls, batch: PairBatch) -> Arguments:
        return (batch.inputs, batch.decoder_inputs), {"padding": batch.padding}

    def results(self) -> dict[str, bytes]:
        return {TRANSLATIONS: written(self.translations).encode()} if self.translations else {}


def check(config: RunConfig, model: nn.Module, data: Any) -> None:
    """Raise ValueError for settings and models unfit for pairs."""
    settings, name = config.training, config.model["name"]
    if not hasattr(model, "encode") or not hasattr(model, "vocabulary"):
        raise ValueError(f"model.name={name!r} takes no pairs of data {data.name!r}; take encoder_decoder")
    longest = data.describe()["max_length"]
    if getattr(model, "max_length", longest) < longest:
        raise ValueError(f"model.max_length={model.max_length} must be at least the data's {longest}; leave it out")
    known = ["loss", "perplexity", *(["bleu", "chrf"] if hasattr(type(data), "texts") else [])]
    if settings.metric not in known:
        raise ValueError(
            f"training.metric={settings.metric!r} does not suit data {data.name!r}; take {' or '.join(known)}"
        )
    if settings.metric in ("bleu", "chrf") and config.evaluation.bleu_sentences == 0:
        raise ValueError(
            f"training.metric={settings.metric} needs translations of the validation split; set "
            "evaluation.bleu_sentences=null for all, or to how many, or take training.metric=loss"
        )
    if settings.batch_tokens is not None and not hasattr(data, "lengths"):
        raise ValueError(
            f"training.batch_tokens={settings.batch_tokens}: data {data.name!r} have no known lengths; leave it "
            "out and set training.batch_size"
        )
    if not settings.batch_tokens and settings.batch_size > len(data):
        raise ValueError(f"training.batch_size={settings.batch_size} exceeds the {len(data)} training pairs; lower it")


def evaluate_pairs(
    model: nn.Module, dataset: Any, world: World, config: RunConfig, sentences: int | None
) -> tuple[dict[str, Any], list[TranslatedRow]]:
    """Return scores of a split, in evaluation mode and float32, and the translations (main process).

    Loss and perplexity are of the whole split, per target token, without label smoothing. Processes share the rows.

    Args:
        sentences: number of translated sentences, from the first on; None for all, which also gives intervals.
    """
    settings = config.training
    size = settings.evaluation_rows
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    with untouched(model):
        for batch in evaluation_batches(dataset, size, world.rank, world.size, settings.workers):
            pairs = to_device(batch, world.device)
            output = model(pairs.inputs, pairs.decoder_inputs, padding=pairs.padding, targets=pairs.targets)
            total[0] += output.outputs.double().sum()
            total[1] += (pairs.targets != IGNORED).sum()
    nats, tokens = world.sum(total).tolist()
    values: dict[str, Any] = {"loss": nats / tokens, "perplexity": perplexity(nats / tokens)}
    if not hasattr(type(dataset), "texts") or dataset.split == "train" or sentences == 0:
        return values, []
    count = len(dataset) if sentences is None else min(sentences, len(dataset))
    with untouched(model):
        translations = _translations(model, dataset, count, world, config.evaluation, size)
    scores: dict[str, Any] = {}
    if world.main:
        said, wanted = ([getattr(row, side) for row in translations] for side in ("hypothesis", "reference"))
        resamples = RESAMPLES if count == len(dataset) and dataset.split == "test" else 0
        scores = corpus_scores(said, wanted, dataset.languages[1], dataset.text_format, resamples)
    return {**values, **world.gather(scores)[0], "sentences": count}, translations


def _translations(
    model: Any, dataset: Any, count: int, world: World, options: EvaluationConfig, batch_size: int
) -> list[TranslatedRow]:
    """The first rows of a data set; processes share them. A batch has sentences of similar length."""
    search: dict[str, Any] = {
        "beams": options.beams,
        "tokens": options.tokens,
        "length_penalty": options.length_penalty,
    }
    mine = sorted(range(world.rank, count, world.size), key=lambda row: (len(dataset[row].source), row))
    found: dict[int, tuple[str, float]] = {}
    for begin in range(0, len(mine), batch_size):
        chosen = mine[begin : begin + batch_size]
        batch = to_device(dataset.collate([dataset[row] for row in chosen]), world.device)
        answer = translate(model, batch.inputs, padding=batch.padding, begin=BEGIN, end=END, **search)
        found |= zip(chosen, answer.texts(dataset.tokenizer), strict=True)
    everyone = {row: text for part in world.gather(found) for row, text in part.items()}
    return [TranslatedRow(dataset.texts.source[row], dataset.texts.target[row], *everyone[row]) for row in range(count)]


def written(translations: list[TranslatedRow]) -> str:
    """Return the file of translations: numbered blocks of four lines, with an empty line between them."""
    return "\n".join(
        f"{number}\t{row.score:.4f}\nsource\t{row.source}\nreference\t{row.reference}\nhypothesis\t{row.hypothesis}\n"
        for number, row in enumerate(translations, 1)
    )
