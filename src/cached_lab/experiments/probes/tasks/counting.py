"""Frequent words of a long text: the two counting tasks of RULER (arXiv:2404.06654).

A text consists of whole lists of words, each with exact counts of every word in a random order, after blanks where the
length is no whole number of lists. The frequent words differ per row. The end asks for them, each predicted from the
words before it. RULER shuffles each sample with the same seed, so that answers of equally long samples are at the same
places; here one generator continues from episode to episode.

Legend: B rows, L tokens of a segment, T tokens of a list, W words, A answers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import Episode, StreamedTask, asked_at_end, guess_of, nothing_asked
from .needles import RULER

LONGEST_LIST = 4096
"""Tokens that are shuffled together."""


class _Counting(StreamedTask):
    """Base of the two tasks. Ids: words, blank, ask.

    Args:
        segment: L. words: W.
    """

    def __init__(self, segment: int, words: int, answers: int, chance: float) -> None:
        if segment < answers:
            raise ValueError(f"segment={segment} must hold the question and all answers but one; take {answers}")
        self.segment, self.words, self.answers = segment, words, answers
        self.vocabulary, self.chance = words + 2, chance

    def without_first(self, distance: int) -> float:
        """Return 1, since the rest of a text may tell the frequent words."""
        return 1.0

    def _list(self, tokens: int) -> Tensor:
        """Return a list for a text of this length, (T,): ranks of words, asked words first; -1 for a blank."""
        raise NotImplementedError("abstract: a task writes _list()")

    def _answers(self, asked_BA: Tensor) -> Tensor:
        """Put the asked words, sorted by rank, into the order of the answers."""
        return asked_BA

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        tokens = distance * self.segment
        list_T = self._list(tokens)
        lists = tokens // len(list_T)
        blank, ask = self.words, self.words + 1
        # The blank follows the words, so that rank -1 selects it.
        words_BW = torch.rand(rows, self.words, generator=generator).argsort(1)
        words_BW = torch.cat([words_BW, torch.full((rows, 1), blank)], 1)
        left_BN = torch.full((rows, tokens - lists * len(list_T)), blank)
        for _ in range(lists):
            order_BT = torch.rand(rows, len(list_T), generator=generator).argsort(1)
            ranks_BT = list_T[order_BT]
            left_BN = torch.cat([left_BN, words_BW.gather(1, ranks_BT % (self.words + 1))], 1)
            whole = left_BN.shape[1] // self.segment * self.segment
            yield from map(nothing_asked, left_BN[:, :whole].split(self.segment, 1) if whole else ())
            left_BN = left_BN[:, whole:]
        answers_BA = self._answers(words_BW[:, : self.answers])
        inputs_BL = torch.full((rows, self.segment), blank)
        inputs_BL[:, -self.answers] = ask
        inputs_BL[:, self.segment - self.answers + 1 :] = answers_BA[:, :-1]
        yield asked_at_end(inputs_BL, answers_BA)


@PROBES.register(
    "common_words",
    asks="counting",
    **RULER,
    chance="common / words",
    sizes="2 words 6 times, 36 once; the paper: 10 words 30 times, others 3 times (in short texts 6 and 1)",
    solved_by="a state that counts; a store only if it holds the whole text",
)
class CommonWords(_Counting):
    """A few words are frequent in a list and all others rare; the end asks for them, in the order of their ids.

    The best guess is the id after the previous answer, right in common / words of all cases. Ids: words, blank, ask.

    Args:
        segment: L. words: W. common: number of frequent words.
        often: count of each of them in a list. rarely: count of each other word.

    Raises:
        ValueError: no word is more frequent than another; a segment too short for the answers.
    """

    def __init__(self, segment: int = 16, words: int = 38, common: int = 2, often: int = 6, rarely: int = 1) -> None:
        if not 1 <= common < words or not 0 <= rarely < often:
            raise ValueError(
                f"common={common} of words={words}, often={often} and rarely={rarely}: some words must be more "
                "frequent than some others; raise words or often"
            )
        super().__init__(segment, words, common, common / words)
        counts_W = torch.full((words,), rarely)
        counts_W[:common] = often
        self.list_T = torch.arange(words).repeat_interleave(counts_W)
        self.shortest = -(-len(self.list_T) // segment)

    def _list(self, tokens: int) -> Tensor:
        return self.list_T

    def _answers(self, asked_BA: Tensor) -> Tensor:
        return asked_BA.sort(1).values


@PROBES.register(
    "frequent_words",
    asks="counting",
    **RULER,
    chance="1 / words, and more with each word revealed",
    sizes="ranks 2 and 3 of 16 words; the paper: ranks 2 to 4, a fiftieth as many words as tokens",
    solved_by="as common_words, with finer counts",
)
class FrequentWords(_Counting):
    """Word counts follow Zipf's law, with a blank as the first rank; the end asks for the next ranks in order.

    Of n tokens floor(n / (zeta(alpha) r^alpha)) are the word of rank r; the rest are blanks. Ids: words, blank, ask.

    Args:
        segment: L. words: W, ranks 2 to W + 1. asked: number of asked ranks, from 2 on.
        alpha: exponent of the law.

    Raises:
        ValueError: asked is not below words; alpha at most 1, where zeta diverges; lists too long.
    """

    def __init__(self, segment: int = 16, words: int = 16, asked: int = 2, alpha: float = 2.0) -> None:
        if not 1 <= asked < words:
            raise ValueError(f"asked={asked} must be 1 to {words - 1}: fewer than words={words}, or raise words")
        if alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 1, where Zipf's law has a sum; the paper's is 2.0")
        super().__init__(segment, words, asked, guess_of(words, asked))
        ranks_W = torch.arange(2, words + 2, dtype=torch.float64)
        self.shares_W = ranks_W**-alpha / torch.special.zeta(torch.tensor(alpha, dtype=torch.float64), 1)
        # Lists of at least this length give neighbouring ranks different counts.
        enough = int((1 / (self.shares_W[asked - 1] - self.shares_W[asked])).ceil())
        if enough > LONGEST_LIST:
            raise ValueError(
                f"asked={asked} with alpha={alpha}: neighbouring ranks differ only in lists of {enough:,} tokens, and "
                f"{LONGEST_LIST:,} are the most; ask for fewer"
            )
        self.shortest = -(-enough // segment)

    def _list(self, tokens: int) -> Tensor:
        length = min(tokens, LONGEST_LIST)
        counts_W = (length * self.shares_W).long()
        list_T = torch.full((length,), -1)
        list_T[: int(counts_W.sum())] = torch.arange(self.words).repeat_interleave(counts_W)
        return list_T
