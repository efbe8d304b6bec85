"""Packed rows: several documents in a row of a decoder of transformers.

Each document is read as a row of its own (`models/documents.py`), so that no attention and no memory crosses its end:
segments, positions and the state begin with it. A row's first document continues the row's state, and the state after
the call is that of its last document.

The caller gives `document_ids`, one number for each token, or `position_ids` that begin again. The first token of
a document is no target: the host's shifted loss would have the last token of another document predict it.

    documents   0 0 0 . 0 1 1      labels   a b c . d e f      targets of the host's tokens   b c d . . f .

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
    column_before,
    ids_of,
    plan_documents,
    read_plan,
    value_before,
)
from cached_transformers.state import State

BOUNDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Bounds for other attention functions, which collators give beside `position_ids`."""
KEYWORDS = ("document_ids", *BOUNDS)

WAY_OUT = "give each text a row of its own, padded on the right (a collator that pads its rows, packing=False)"
NO_CACHE = (
    "a KV cache continues one text in each row, not several documents; leave use_cache and past_key_values out and "
    "continue with memory_state, or"
)
COMPILED = (
    "a compiled graph cannot depend on their values; give document_ids, which are read outside of the graph, call the "
    "model without torch.compile, or"
)


class PackedDocuments(NamedTuple):
    """The documents in the rows of a call, on the CPU.

    Attributes:
        ids_BM: the document of each token, -1 at padding. plan: of reading them; None where no row has several.
    """

    ids_BM: Tensor
    plan: DocumentPlan | None

    def with_mask(self, given: dict[str, Any]) -> dict[str, Any]:
        """The call for rows of one document each, with padding where there is no document."""
        tokens, mask = given.get("input_ids", given.get("inputs_embeds")), given.get("attention_mask")
        if tokens is None or bool((self.ids_BM >= 0).all()) or (mask is not None and mask.shape != self.ids_BM.shape):
            return given
        return {**given, "attention_mask": (self.ids_BM >= 0).long().to(tokens.device)}


def documents_told(ids: Tensor | None, given: dict[str, Any], rows: int, columns: int) -> PackedDocuments | None:
    """The documents of a call; None without bounds.

    Args:
        ids: `document_ids`. given: the host's other arguments, by name. rows, columns: B and M.

    Raises:
        ValueError: the ids have another shape than the tokens, or are beside positions.
    """
    mask = given.get("attention_mask")
    positions: Any = given.get("position_ids")
    padding_BM = mask.cpu() == 0 if isinstance(mask, Tensor) and mask.shape == (rows, columns) else None
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.shape not in ((rows, columns), (1, columns)):
            found = f"of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"of type {type(ids).__name__}"
            raise ValueError(f"document_ids {found} must be a tensor with an id for each token, {(rows, columns)}")
        if positions is not None:
            raise ValueError(
                "position_ids beside document_ids: positions begin again with each document; leave one out"
            )
        ids = ids.expand(rows, columns)
        check_documents(ids, rows, columns)
        ids_BM = ids_of(ids, padding_BM)
    elif may_begin_again(positions) and positions.shape[1] == columns:
        positions_BM = positions.expand(rows, columns).cpu()
        real_BM = torch.ones_like(positions_BM, dtype=torch.bool) if padding_BM is None else ~padding_BM
        begins_BM = _falls(positions_BM, real_BM)
        if not bool(begins_BM.any()):
            return None
        ids_BM = begins_BM.cumsum(1).masked_fill(~real_BM, PADDING)
    else:
        return None
    several = bool((_begins(ids_BM).sum(1) > 1).any())
    return PackedDocuments(ids_BM, plan_documents(ids_BM) if several else None)


def may_begin_again(positions: Any) -> bool:
    """Return True if the values of `position_ids` can be read: neither in a graph nor in a fake tensor."""
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor) or isinstance(positions, FakeTensor):
        return False
    return positions.dim() == 2 and positions.shape[1] > 1


def _begins(ids_BM: Tensor) -> Tensor:
    """First tokens of documents."""
    return (ids_BM >= 0) & (ids_BM != value_before(ids_BM, ids_BM >= 0))


def _falls(positions_BM: Tensor, real_BM: Tensor) -> Tensor:
    """Tokens whose position is not after that of the token before them."""
    return real_BM & (real_BM.cumsum(1) > 1) & (positions_BM <= value_before(positions_BM, real_BM))


def refuse_packed(positions_BM: Tensor, padding_BM: Tensor | None, why: str) -> None:
    """Refuse (`insist`) rows whose positions begin again."""
    real_BM = torch.ones_like(positions_BM, dtype=torch.bool) if padding_BM is None else ~padding_BM
    insist(~_falls(positions_BM, real_BM).any(), why)


def refuse_other_bounds(bounds: dict[str, Any], found: PackedDocuments | None, rows: int) -> None:
    """Raise ValueError if `BOUNDS` give another number of documents than were found; None is one for each row."""
    count = rows if found is None else int(_begins(found.ids_BM).sum())
    for name, t in bounds.items():
        if name.startswith("max_length"):
            continue
        told = int((t.diff() != 0).sum()) + rows if name == "seq_idx" else t.numel() - 1
        if told != count:
            raise ValueError(f"{name} bounds {told} documents, document_ids or position_ids {count}; leave one out")


def refuse_told(given: dict[str, Any], why: str) -> None:
    """Raise ValueError if one of `KEYWORDS` is given."""
    for name in KEYWORDS:
        if given.get(name) is not None:
            raise ValueError(f"{name}: {why} {WAY_OUT}")


def score_within(given: dict[str, Any], ids_BM: Tensor) -> None:
    """Change the labels of a call so that no token of one document is to predict a token of another."""
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if isinstance(labels, Tensor) and labels.shape == ids_BM.shape:
        given["labels"] = labels_within(labels, ids_BM.to(labels.device))
    if isinstance(shifted, Tensor) and shifted.shape == ids_BM.shape:  # each has the next label in its place
        ids_BM = ids_BM.to(shifted.device)
        ends_BM = torch.cat([_begins(ids_BM)[:, 1:], torch.zeros_like(ids_BM[:, :1], dtype=torch.bool)], 1)
        given["shift_labels"] = shifted.masked_fill(ends_BM | (ids_BM < 0), IGNORED)


def labels_within(labels_BM: Tensor, ids_BM: Tensor) -> Tensor:
    """Labels with which the host's shifted loss has each token predict the next one of its document.

    The target of a column is the label of the next one, so that a label moves before the padding before it.
    """
    columns = labels_BM.shape[1]
    target_BM = column_before(ids_BM >= 0) + 1
    target_BM = target_BM.masked_fill((ids_BM < 0) | _begins(ids_BM), columns)
    moved_BM = labels_BM.new_full((len(labels_BM), columns + 1), IGNORED)
    return moved_BM.scatter(1, target_BM, labels_BM)[:, :columns]


def refuse_pooled(model: nn.Module, out: Any) -> None:
    """Raise ValueError unless the model answers for each token: rows hold several documents."""
    answers = out.get("logits", out.get("last_hidden_state"))
    if answers is None or answers.dim() != 3 or out.get("mc_logits") is not None:
        raise ValueError(f"{type(model).__name__} answers once for a row, which holds several documents; {WAY_OUT}")


Rows = Callable[[dict[str, Tensor], Tensor | None, State], tuple[Any, State]]
"""Reads one text per row: (tokens by name, (P, N, ...) each; their padding; state before) -> (host's output, state)."""


def read_packed(
    read: Rows, new: dict[str, Tensor], plan: DocumentPlan, state: State, init_state: Callable[[int], State]
) -> tuple[Any, State]:
    """The host's output for rows of documents, zeros at padding, and the state after each row's last document.

    Args:
        new: tokens by name, (B, M, ...) each. plan: of `documents_told`.
        state: of the rows. init_state: of a number of rows that have read nothing.
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
