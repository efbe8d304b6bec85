"""Rows in which documents stand one behind the other, as a decoder of transformers is called with them.

Each document is read as a row of its own (`models/documents.py`), so that no attention and no memory crosses its end:
segments, places and the state begin with it, wherever it begins. A row's first document goes on with the row's state,
and the state after the call is that of its last one.

Who packs rows says where documents begin: by `document_ids`, one number for each token, by `seq_idx`, which is the
same, by `cu_seq_lens_q`, or by `position_ids` that begin again. A token that begins a document is no target: the host's
shifted loss would ask the last token of another one for it.

    documents   0 0 0 . 0 1 1      labels   a b c . d e f      asked of the host's tokens   b c d . . f .

Legend: B rows, M columns of a call, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from cached_transformers.checks import insist
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.models.documents import (
    PADDING,
    DocumentPlan,
    check_documents,
    document_ids_from_cu_seqlens,
    ids_of,
    plan_documents,
    read_plan,
)
from cached_transformers.state import State

IDS = ("document_ids", "seq_idx")
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
KEYWORDS = (*IDS, *BOUNDS, "max_length_q", "max_length_k")
"""What tells where documents begin, beside `position_ids`."""

WAY_OUT = "give each text a row of its own, padded on the right (a collator that pads its rows, packing=False)"
NO_CACHE = (
    "keys and values are kept for texts that go on, one in each row, not for rows of several documents; leave "
    "use_cache and past_key_values out and go on with memory_state, or"
)
COMPILED = (
    "a compiled graph cannot depend on where; say by document_ids where documents begin, which is asked outside of the "
    "graph, call the model without torch.compile, or"
)


class Documents(NamedTuple):
    """What a call is told of the documents in its rows, on the CPU.

    Attributes:
        ids_BM: the document of each token, -1 at padding. plan: how they are read; None where no row has several.
    """

    ids_BM: Tensor
    plan: DocumentPlan | None

    def with_mask(self, given: dict[str, Any]) -> dict[str, Any]:
        """The call for rows of one document each, in which what has no document is padding."""
        tokens, mask = given.get("input_ids", given.get("inputs_embeds")), given.get("attention_mask")
        if tokens is None or bool((self.ids_BM >= 0).all()) or (mask is not None and mask.shape != self.ids_BM.shape):
            return given
        return {**given, "attention_mask": (self.ids_BM >= 0).long().to(tokens.device)}


def documents_told(told: dict[str, Any], given: dict[str, Any], rows: int, columns: int) -> Documents | None:
    """The documents of a call; None where nobody tells of any.

    Args:
        told: what was given of `KEYWORDS`. given: what else the host is called with, by name. rows, columns: B and M.

    Raises:
        ValueError: what is given contradicts itself, or is of another shape than the tokens.
    """
    ids_BM = _ids_told({name: t for name, t in told.items() if name in (*IDS, *BOUNDS)}, given, rows, columns)
    if ids_BM is None:
        return None
    several = bool((_begins(ids_BM).sum(1) > 1).any())
    return Documents(ids_BM, plan_documents(ids_BM) if several else None)


def _ids_told(told: dict[str, Any], given: dict[str, Any], rows: int, columns: int) -> Tensor | None:
    """The document of each token, (B, M), -1 at padding."""
    mask, places = given.get("attention_mask"), given.get("position_ids")
    padding_BM = mask.cpu() == 0 if isinstance(mask, Tensor) and mask.shape == (rows, columns) else None
    places_BM = None
    if isinstance(places, Tensor) and may_begin_again(places) and places.shape[1] == columns:
        places_BM = places.expand(rows, columns).cpu()
    if not told:
        if places_BM is None:
            return None
        real_BM = torch.ones_like(places_BM, dtype=torch.bool) if padding_BM is None else ~padding_BM
        begins_BM = _falls(places_BM, real_BM)
        return begins_BM.cumsum(1).masked_fill(~real_BM, PADDING) if bool(begins_BM.any()) else None
    found = {name: ids_of(_ids(name, t, rows, columns), padding_BM) for name, t in told.items()}
    (name, ids_BM), *others = found.items()
    for other, other_BM in others:
        if not torch.equal(_begins(ids_BM), _begins(other_BM)):
            raise ValueError(f"{name} and {other} say that documents begin in different places; give one of them")
    if places_BM is not None:
        _refuse_places(places_BM, ids_BM, name)
    return ids_BM


def may_begin_again(places: Any) -> bool:
    """Whether to look at values of `position_ids`: a graph insists (`refuse_packed`), and a tensor without values, on
    which operations are counted, has none."""
    if torch.compiler.is_compiling() or not isinstance(places, Tensor) or isinstance(places, FakeTensor):
        return False
    return places.dim() == 2 and places.shape[1] > 1


def _ids(name: str, t: Any, rows: int, columns: int) -> Tensor:
    """What one keyword says, as ids (B, M)."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} of type {type(t).__name__} must be a tensor that says where documents begin")
    if name in BOUNDS:  # counted over all rows
        ends = range(columns, rows * columns + 1, columns)
        if t.dim() != 1 or not set(ends) <= set(t.tolist()) or int(t[-1]) != rows * columns:
            raise ValueError(
                f"{name}={t.tolist()} must be where documents begin, counted over all rows: 0, ..., {rows * columns}, "
                "with the end of each row among them"
            )
        t = document_ids_from_cu_seqlens(t).view(rows, columns)
    elif t.shape == (1, columns):
        t = t.expand(rows, columns)
    if t.shape != (rows, columns):
        raise ValueError(f"{name} of shape {tuple(t.shape)} must be an id for each token, {(rows, columns)}")
    check_documents(t, rows, columns)
    return t


def column_before(real_BM: Tensor) -> Tensor:
    """The column of the last token in front of each place, -1 where there is none."""
    columns_BM = torch.arange(real_BM.shape[1], device=real_BM.device).expand_as(real_BM)
    last_BM = columns_BM.masked_fill(~real_BM, -1).cummax(1).values
    return torch.cat([torch.full_like(last_BM[:, :1], -1), last_BM[:, :-1]], 1)


def _begins(ids_BM: Tensor) -> Tensor:
    """Tokens with which a document begins."""
    before_BM = column_before(ids_BM >= 0)
    goes_on_BM = (before_BM >= 0) & (ids_BM == ids_BM.gather(1, before_BM.clamp(min=0)))
    return (ids_BM >= 0) & ~goes_on_BM


def _rises(places_BM: Tensor, real_BM: Tensor) -> tuple[Tensor, Tensor]:
    """By how much a token's place is behind that of the token before it, and where there is such a token."""
    before_BM = column_before(real_BM)
    return places_BM - places_BM.gather(1, before_BM.clamp(min=0)), real_BM & (before_BM >= 0)


def _falls(places_BM: Tensor, real_BM: Tensor) -> Tensor:
    """Tokens whose place is not behind that of the token before them."""
    rise_BM, inside_BM = _rises(places_BM, real_BM)
    return inside_BM & (rise_BM <= 0)


def _refuse_places(places_BM: Tensor, ids_BM: Tensor, name: str) -> None:
    """Refuse (ValueError) places that do not begin again with each document, and nowhere else."""
    rise_BM, inside_BM = _rises(places_BM, ids_BM >= 0)
    begins_BM = _begins(ids_BM)
    wrong_BM = inside_BM & torch.where(begins_BM, rise_BM == 1, rise_BM <= 0)
    if bool(wrong_BM.any()):
        row, column = wrong_BM.nonzero()[0].tolist()
        what = "go on where a document begins" if bool(begins_BM[row, column]) else "begin again inside a document"
        raise ValueError(
            f"position_ids {what}, by {name} in row {row}, column {column}; leave position_ids out, and places begin "
            "again with each document"
        )


def refuse_packed(places_BM: Tensor, padding_BM: Tensor | None, why: str) -> None:
    """Refuse (`insist`) rows whose places begin again."""
    real_BM = torch.ones_like(places_BM, dtype=torch.bool) if padding_BM is None else ~padding_BM
    insist(~_falls(places_BM, real_BM).any(), why)


def refuse_told(given: dict[str, Any], why: str) -> None:
    """Refuse what tells where documents begin.

    Raises:
        ValueError: there is such a keyword.
    """
    for name in KEYWORDS:
        if given.get(name) is not None:
            raise ValueError(f"{name}: {why} {WAY_OUT}")


def score_within(given: dict[str, Any], ids_BM: Tensor) -> None:
    """Change the labels of a call so that no loss asks a token of one document for a token of another."""
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if isinstance(labels, Tensor) and labels.shape == ids_BM.shape:
        given["labels"] = labels_within(labels, ids_BM.to(labels.device))
    if isinstance(shifted, Tensor) and shifted.shape == ids_BM.shape:  # whoever shifts has the next label in each place
        ids_BM = ids_BM.to(shifted.device)
        ends_BM = torch.cat([_begins(ids_BM)[:, 1:], torch.zeros_like(ids_BM[:, :1], dtype=torch.bool)], 1)
        given["shift_labels"] = shifted.masked_fill(ends_BM | (ids_BM < 0), IGNORED)


def labels_within(labels_BM: Tensor, ids_BM: Tensor) -> Tensor:
    """Labels by which the host's shifted loss asks each token for the next one of its document, and no other token.

    The host asks a column for the label of the next one, so that a label moves in front of the padding before it.
    """
    columns = labels_BM.shape[1]
    target_BM = column_before(ids_BM >= 0) + 1
    target_BM = target_BM.masked_fill((ids_BM < 0) | _begins(ids_BM), columns)
    moved_BM = labels_BM.new_full((len(labels_BM), columns + 1), IGNORED)
    return moved_BM.scatter(1, target_BM, labels_BM)[:, :columns]


def refuse_pooled(model: nn.Module, out: Any) -> None:
    """Refuse an answer for each row where rows hold several documents.

    Raises:
        ValueError: it is none for each token.
    """
    answers = out.get("logits", out.get("last_hidden_state"))
    if answers is None or answers.dim() != 3 or out.get("mc_logits") is not None:
        raise ValueError(f"{type(model).__name__} answers once for a row, which holds several documents; {WAY_OUT}")


Rows = Callable[[dict[str, Tensor], Tensor | None, State], tuple[Any, State]]
"""Reads one text a row: (tokens by name, (P, N, ...) each; their padding; state before) -> (host's output, state)."""


def read_packed(
    read: Rows, new: dict[str, Tensor], plan: DocumentPlan, state: State, init_state: Callable[[int], State]
) -> tuple[Any, State]:
    """The host's output for rows of documents, zeros at padding, and the state after each row's last document.

    Args:
        new: tokens by name, (B, M, ...) each. plan: of `documents_told`.
        state: of the rows. init_state: a fresh one of so many.
    """
    outs: list[Any] = []

    def read_group(*given: Any) -> ModelOutput:
        *tokens, before, padding = given
        out, after = read(dict(zip(new, tokens, strict=True)), padding, before)
        outs.append(out)
        parts = [out.last_hidden_state, *(out.get("hidden_states") or ())]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return ModelOutput(whole, after, whole.new_zeros(()))

    placed, after, _ = read_plan(read_group, plan, list(new.values()), state, init_state)
    out = outs[-1]
    hidden = out.get("hidden_states") or ()
    whole, *layers = placed.split([t.shape[-1] for t in (out.last_hidden_state, *hidden)], -1)
    out["last_hidden_state"] = whole
    if hidden:
        out["hidden_states"] = tuple(layers)
    return out, after
