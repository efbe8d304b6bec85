"""Data order: a pure function of (seed, epoch), the same for any start, process count, pieces and workers."""

from __future__ import annotations

import itertools

import standin
import torch
from refusals import refuses

from cached_lab.training.loader import Share, TrainingOrder, evaluation_batches


def take(order: TrainingOrder, count: int) -> list[list[tuple[int, int]]]:
    return list(itertools.islice(order, count))


def test_an_epoch_holds_every_row_once_and_epochs_differ():
    batches = take(TrainingOrder(12, 4, seed=3), 6)
    first, second = (list(itertools.chain(*batches[i : i + 3])) for i in (0, 3))
    assert sorted(index for _, index in first) == sorted(index for _, index in second) == list(range(12))
    assert {epoch for epoch, _ in first} == {0} and {epoch for epoch, _ in second} == {1}
    assert [index for _, index in first] != [index for _, index in second]


def test_starting_later_continues_the_same_order():
    whole = take(TrainingOrder(10, 3, seed=1), 9)
    for start in range(9):
        assert take(TrainingOrder(10, 3, seed=1, start=start), 9 - start) == whole[start:]


def test_processes_and_pieces_together_take_the_rows_of_one_process():
    whole = take(TrainingOrder(20, 8, seed=1), 4)
    for size, count in ((2, 1), (1, 4), (2, 2)):
        pieces = [take(TrainingOrder(20, 8, 1, 0, Share(rank, size, count)), 4 * count) for rank in range(size)]
        for step in range(4):
            parts = [p for mine in pieces for p in mine[step * count : (step + 1) * count]]
            assert list(itertools.chain(*parts)) == whole[step]


def test_a_batch_that_does_not_fit_is_refused():
    refuses("batch_size=8", TrainingOrder, 20, 8, 0, share=Share(processes=3))
    refuses("batch_size=8", TrainingOrder, 7, 8, 0)


def test_evaluation_covers_every_row_once_for_uneven_shares():
    data = standin.StandinRows("validation", size=11)
    seen = [b.inputs for rank in range(3) for b in evaluation_batches(data, 2, rank, 3)]
    assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted(data.points[:, 0].tolist())
