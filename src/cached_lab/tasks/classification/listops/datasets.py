"""ListOps as data sets: generated ("listops"), and from files ("listops_tsv").

Paper: Tay et al., arXiv:2011.04006. Every published score of 35 to 37 % equals the accuracy of guessing from the root
operator; `baselines` measures it for the data used.

Shape legend: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.archives import as_text, naming, read_file, unpacked
from cached_lab.data.dataset import Batch, LabelledDataset
from cached_lab.data.samples import Sample
from cached_lab.data.splits import check_choice, check_split, named_split
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.registries import DATASETS

from .expressions import (
    GENERATOR_VERSION,
    PADDING_ID,
    VOCABULARY,
    Expression,
    generate_trees,
    root_operator_baselines,
    tokenize,
)

_PAPER = "arXiv:2011.04006"
_MOST = 10_000_000
"""Most expressions of a split: over an hour of generating."""


class ExpressionDataset(LabelledDataset):
    """Expressions held in memory, one byte per token. Items are (token identifiers long (N,), value).

    Args:
        arrays: "tokens", identifiers of all expressions one after another, uint8 (total,); "ends", the end of each
            expression, integers (size,); "labels", values, integers (size,).
        max_length: longest input of a model, in tokens.
        pad_to: "batch" pads to the longest of the batch, "max" to `max_length` (as the arena does).
    """

    def __init__(self, name: str, split: str, arrays: Arrays, max_length: int, pad_to: str) -> None:
        super().__init__(name, split, arrays["labels"], classes=10)
        check_choice("pad_to", pad_to, ("batch", "max"))
        self.max_length, self.pad_to = max_length, pad_to
        self._tokens, self._ends = arrays["tokens"], arrays["ends"]

    def expression(self, index: int) -> Expression:
        """Tokens and value of one item."""
        position = self.position(index)
        start = int(self._ends[position - 1]) if position else 0
        return Expression(self._tokens[start : self._ends[position]].tobytes(), int(self.labels[position]))

    def expressions(self) -> Iterator[Expression]:
        """All items, in order."""
        return (self.expression(index) for index in range(len(self)))

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield self._tokens
        yield self._ends

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        expression = self.expression(index)
        return torch.tensor(list(expression.tokens), dtype=torch.long), expression.label

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch:
        """Pad with identifier 0 to the length of `pad_to`."""
        length = self.max_length if self.pad_to == "max" else max(len(tokens_N) for tokens_N, _ in items)
        inputs_BN = torch.full((len(items), length), PADDING_ID, dtype=torch.long)
        for row, (tokens_N, _) in enumerate(items):
            inputs_BN[row, : len(tokens_N)] = tokens_N
        targets_B = torch.tensor([label for _, label in items], dtype=torch.long)
        return Batch(inputs_BN, targets_B, padding=inputs_BN == PADDING_ID)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "vocabulary": len(VOCABULARY), "max_length": self.max_length}

    def baselines(self, train: LabelledDataset) -> dict[str, float]:
        """Accuracies (0..1) on this split of the three guessers of `root_operator_baselines`, fitted to `train`."""
        assert isinstance(train, ExpressionDataset)
        return root_operator_baselines(train.expressions(), self.expressions())


@DATASETS.register("listops", paper=_PAPER)
@dataclass(eq=False, repr=False)
class ListOps(ExpressionDataset):
    """Long ListOps, generated: classify the value (0..9) of a nested expression; defaults of the Long Range Arena.

    The data are generated once (about half a millisecond per expression at the defaults) and cached. Splits have their
    own streams, and in the order test, validation, train each leaves out the expressions of those before it: splits are
    disjoint, a larger training split begins with a smaller one, and its size does not change the other two.

    Args:
        split: "train", "validation" or "test".
        max_depth, max_args, min_length, max_length: see `generate_trees`.
        train_size, validation_size, test_size: number of expressions of each split.
        seed: of the data set; independent of training seeds.
        pad_to: "batch" or "max".

    Raises:
        ValueError: see `generate_trees`; also a size below 1, or above ten million.
    """

    split: str
    _: KW_ONLY
    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000
    train_size: int = 96_000
    validation_size: int = 2_000
    test_size: int = 2_000
    seed: int = 0
    pad_to: str = "batch"

    def __post_init__(self) -> None:
        shape = {name: getattr(self, name) for name in ("max_depth", "max_args", "min_length", "max_length")}
        sizes = {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}
        for name, size in sizes.items():
            if not 1 <= size <= _MOST:
                raise ValueError(f"{name}_size={size} must lie in 1..{_MOST:,}: all of them are held in memory")
        arrays = _generated(check_split(self.split), shape, sizes, self.seed)
        super().__init__("listops", self.split, arrays, self.max_length, self.pad_to)

    @classmethod
    def foretell(cls, **options: Any) -> dict[str, object]:
        """The result of `describe` for these options, without generating more than one expression."""
        return cls("test", **{**options, "test_size": 1}).describe()


@DATASETS.register("listops_tsv", paper=_PAPER)
@dataclass(eq=False, repr=False)
class ListOpsTSV(ExpressionDataset):
    """Long ListOps from the Long Range Arena's files, plain or xz-compressed.

    A file has the header `Source<TAB>Target` and one expression with its value per line.

    Args:
        split: "train", "validation" or "test".
        path: folder with one file per split (`basic_train.tsv`, `basic_val.tsv`, `basic_test.tsv.xz`).
        max_length: longest expression allowed, in tokens; 2000 as in the arena.
        pad_to: "batch" or "max".

    Raises:
        FileNotFoundError: no file for the split.
        ValueError: several files for the split, a malformed line (named), or an expression that is too long.
    """

    split: str
    _: KW_ONLY
    path: str | Path
    max_length: int = 2000
    pad_to: str = "batch"

    def __post_init__(self) -> None:
        check_split(self.split)
        root = Path(self.path).expanduser()
        files = [f for f in sorted(root.glob("*.tsv*")) if named_split(f.name.partition(".tsv")[0], ()) == self.split]
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            problem = ValueError if files else FileNotFoundError
            raise problem(
                f"{root} must hold one .tsv or .tsv.xz named after split {check_split(self.split)!r}; {found}"
            )
        expressions = read_tsv(files[0])
        longest = max(len(expression.tokens) for expression in expressions)
        if longest > self.max_length:
            message = f"{files[0]} holds an expression of {longest} tokens, and max_length={self.max_length}"
            raise ValueError(f"{message}; raise max_length")
        super().__init__("listops_tsv", self.split, _packed(expressions), self.max_length, self.pad_to)


def read_tsv(path: Path) -> list[Expression]:
    """Expressions of a file, in order (ValueError: the file, or one of its lines, named, is malformed)."""
    with naming(path, "file"):
        content = unpacked(read_file(path), path, path.suffix)
        header, *lines = as_text(content, path).splitlines() or [""]
    if header != "Source\tTarget" or not lines:
        raise ValueError(f"{path}, line 1: expected 'Source<TAB>Target' and rows, found {header[:60]!r}")
    expressions = []
    for number, line in enumerate(lines, 2):
        source, tab, label = line.partition("\t")
        try:
            if label not in {*"0123456789"} or not tab:
                raise ValueError(f"expected an expression, a tab and a digit, found {line[-20:]!r}")
            expressions.append(Expression(tokenize(source), int(label)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return expressions


def _generated(split: str, shape: dict[str, int], sizes: dict[str, int], seed: int) -> Arrays:
    """Generate a split; `sizes` is in the order of generation, and a split depends on those before it only."""
    earlier = list(sizes)[: list(sizes).index(split)]
    key = {**shape, "seed": seed, "split": split, "version": GENERATOR_VERSION}
    key["sizes"] = {name: sizes[name] for name in (*earlier, split)}

    def build() -> Arrays:
        taken: set[bytes] = set()
        for arrays in (_generated(name, shape, sizes, seed) for name in earlier):
            taken.update(part.tobytes() for part in np.split(arrays["tokens"], arrays["ends"][:-1]))
        stream = generate_trees(f"{seed}/{split}", **shape)
        return _packed(islice((e for e in stream if e.tokens not in taken), sizes[split]))

    return load_or_build("listops", key, build)


def _packed(expressions: Iterable[Expression]) -> Arrays:
    tokens, labels = zip(*expressions, strict=True)
    return {
        "tokens": np.frombuffer(b"".join(tokens), dtype=np.uint8),
        "ends": np.cumsum([len(identifiers) for identifiers in tokens], dtype=np.int64),
        "labels": np.array(labels, dtype=np.uint8),
    }
