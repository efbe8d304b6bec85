"""Segatron-XL (Bai et al. 2021, arXiv:2004.14996; github.com/rsvp-ai/segatron_aaai).

Transformer-XL whose distances are triples: tokens, sentences and paragraphs between two places.

    R_ij = [R^t(T_i - T_j); R^s(S_i - S_j); R^p(P_i - P_j)],  each block sines, then cosines, of a width of its own

Legend: B rows, N tokens, M slots, K = M + N, Z distances, H heads, E head width, D = H * E model width, P position
channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import insist, known
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Context, Entry, ModelMemory, Projections, ProjectKV, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, one_segment, whole_episode
from cached_transformers.linear_maps import matrix_of
from cached_transformers.positions import KeptScheme, Positions, RelativePositions, angles, widest
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Pairs, Rows
from .parts.options import one_of
from .transformer_xl import TransformerXL

own_word("token_ids", "the token ids of the segment")

CHANNELS = 3
"""Token, sentence and paragraph."""


class SegatronState(NamedTuple):
    """Number of the next token's sentence and paragraph, counted from the beginning of the stream."""

    sentence_B: Tensor
    paragraph_B: Tensor


class SegatronPositions(RelativePositions):
    """Relative positions of Transformer-XL over three channels of positions, each with a block of the code R.

    Each query meets every row of a table of each channel, and picks by distance: 3 B H N K E multiply-adds, or fewer in
    training on the CPU. For attention over the last tokens: no two places are further apart than K - 1.

    Args:
        widths: channels of the three blocks, D in all; the paper's when None.
        shift: "exact", or "official" for D_ij = X_last - X_(j + N - 1 - i), the distance of the released code.
        signed: keys may be after the query, whose distances are below 0; without, they count as 0.
    """

    def __init__(
        self,
        heads: int,
        head_width: int,
        *,
        widths: Sequence[int] | None = None,
        clamp: int | None = None,
        shift: str = "exact",
        signed: bool = False,
        base: float = 10000.0,
    ) -> None:
        super().__init__(heads, head_width, clamp=clamp, base=base)
        self.widths = tuple(widths) if widths is not None else paper_widths(self.width)
        if len(self.widths) != CHANNELS or sum(self.widths) != self.width or any(w < 0 or w % 2 for w in self.widths):
            raise ValueError(
                f"widths={self.widths} of tokens, sentences and paragraphs must be three even numbers that add up to "
                f"width={self.width}; None takes the paper's, {paper_widths(self.width)}"
            )
        self.shift, self.signed = one_of("shift", shift, ("exact", "official")), signed

    def open(self, run: bool) -> Positions:
        return _SegatronTables(self)

    def by_distance(self, q_BHNE: Tensor, count: int) -> None:
        return None  # of three distances

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        keys = k_positions_BMP.shape[1]
        least = 1 - keys if self.signed else 0
        tables = self.tables(keys - 1, least)
        return self.looked_up(q_BHNE, q_positions_BNP, k_positions_BMP, tables, keys - 1, least, causal_run)

    def tables(self, most: int, least: int = 0) -> dict[int, Tensor]:
        """(H, E, Z) of each channel that has a width, for distances from `most` down to `least`."""
        rows_Z = torch.arange(most, least - 1, -1, device=self.position_bias.device)
        if self.clamp is not None:
            rows_Z = rows_Z.clamp(-self.clamp, self.clamp)
        tables = {}
        for channel, weight_DW in enumerate(matrix_of(self.project)[0].split(self.widths, 1)):
            if self.widths[channel]:
                angle = angles(rows_Z[None, :, None], self.widths[channel], self.base, widest(rows_Z.device))[0]
                code_ZW = torch.cat([angle.sin(), angle.cos()], -1).to(weight_DW.dtype)
                tables[channel] = (code_ZW @ weight_DW.mT).unflatten(-1, (self.heads, self.head_width)).permute(1, 2, 0)
        return tables

    def looked_up(
        self,
        q_BHNE: Tensor,
        q_positions_BNP: Tensor,
        k_positions_BMP: Tensor,
        tables: Mapping[int, Tensor],
        most: int,
        least: int = 0,
        run: bool = False,
    ) -> Tensor:
        """The bias, by what `tables` gave for distances from `most`, which may be further than the keys reach.

        In a `run` of exactly these keys, the first table's rows are shifted, as Transformer-XL's are.
        """
        (rows, _, n, _), keys = q_BHNE.shape, k_positions_BMP.shape[1]
        # Heads first: tables serve all rows in one product, without a copy for each.
        q_HTE = self._asking(q_BHNE).transpose(0, 1).flatten(1, 2)
        found = []
        for channel, table_HEZ in tables.items():
            if run and channel == 0:
                scores_HBNZ = (q_HTE @ table_HEZ).unflatten(1, (rows, n))
                found.append(F.pad(scores_HBNZ, (1, 0)).flatten(-2)[..., n:].unflatten(-1, (n, keys)))
                continue
            q_BN, k_BK = q_positions_BNP[..., channel], k_positions_BMP[..., channel]
            first_B1 = k_BK.amin(1, keepdim=True)
            count = self._few(q_HTE, k_BK - first_B1)
            if count:  # each number once, for all keys that have it
                number_C = torch.arange(count, device=k_BK.device)
                distance_BNK, low, high = (q_BN - first_B1)[..., None] - number_C, max(least, 1 - count), count - 1
            else:
                distance_BNK, low, high = self._distances(q_BN, k_BK), least, keys - 1
            row_BNK = high - distance_BNK.clamp(low, high)
            scores_HBNZ = (q_HTE @ table_HEZ[..., most - high : most - low + 1]).unflatten(1, (rows, n))
            found_HBNK = scores_HBNZ.gather(-1, row_BNK.expand(len(q_HTE), rows, -1, -1))
            if count:
                found_HBNK = found_HBNK @ ((k_BK - first_B1)[:, None] == number_C[:, None]).to(found_HBNK.dtype)
            found.append(found_HBNK)
        return sum(found[1:], found[0]).transpose(0, 1)

    def _few(self, q_HTE: Tensor, number_BK: Tensor) -> int:
        """Number of numbers that keys have, if a product is faster than a gather, whose gradient is slow; or 0."""
        asks = q_HTE.requires_grad and self.shift == "exact" and known(q_HTE) and known(number_BK)
        count = int(number_BK.max()) + 1 if asks else 0
        return count if 4 * count <= number_BK.shape[1] else 0

    def _distances(self, q_BN: Tensor, k_BK: Tensor) -> Tensor:
        """(B, N, K): how far each key lies after each query."""
        if self.shift == "exact":
            return q_BN[:, :, None] - k_BK[:, None]
        n, keys = q_BN.shape[1], k_BK.shape[1]
        index = torch.arange(keys, device=q_BN.device)
        shifted_NK = (index + index[:n].flip(0)[:, None]).clamp(max=keys - 1)
        return q_BN[:, -1:, None] - k_BK[:, shifted_NK]


class _SegatronTables(KeptScheme):
    """The scheme for tokens that come one at a time, without later ones: tables are computed once."""

    def __init__(self, scheme: SegatronPositions) -> None:
        super().__init__(scheme)
        self._tables: dict[int, Tensor] = {}
        self._reach = 0

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        if self._reach < k_positions_BMP.shape[1]:
            self._reach = 2 * k_positions_BMP.shape[1]
            self._tables = self.scheme.tables(self._reach - 1)
        found_BHNM = self.scheme.looked_up(q_BHNE, q_positions_BNP, k_positions_BMP, self._tables, self._reach - 1)
        return found_BHNM  # type: ignore[no-any-return]


class SegatronLayer(TransformerXL):
    """Segatron-XL's store of one layer: the layer's last inputs and their positions, in three channels."""

    channels = CHANNELS

    def open(self, state: Rows | Pairs, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        assert first_B1P is not None
        context = super().open(state, first_B1P, project_kv)
        # The segment's positions have more channels, which keys of the context have no use for.
        rest = first_B1P.shape[-1] - CHANNELS
        return context._replace(positions_BMP=F.pad(context.positions_BMP, (0, rest)))

    def write(self, state: Rows | Pairs, trace: Trace) -> tuple[Any, Tensor | None]:
        assert trace.query.positions_BNP is not None
        query = trace.query._replace(positions_BNP=trace.query.positions_BNP[..., :CHANNELS])
        return super().write(state, trace._replace(query=query))


@MEMORIES.register(
    "segatron",
    paper="arXiv:2004.14996",
    title="Segatron-XL",
    carries="the last inputs of every layer, with places in tokens, sentences and paragraphs",
    purpose="the last tokens as they were",
    equations="Transformer-XL with R of the distances in tokens, sentences and paragraphs, side by side",
    state="per row: 16 bytes, and per layer M (4 D + 24) + 8 bytes; in evaluation with keep='kv' M (8 D + 24) + 8",
    cost="per token and layer: 2 D^2 M / N (keys and values of the memory; in evaluation with keep='kv' none) + "
    "5 M D + 2 N D multiply-adds",
    reads_again="its segment for each written token, with shift='official'",
    reach="layers x M tokens",
    gradient="none into the memory; its keys and values train the projections",
    exact_when="length >= tokens seen",
    probe=Probing(whole_episode, one_segment),
)
class Segatron(ModelMemory):
    """Transformer-XL that also knows how many sentences and paragraphs ago something was.

    A sentence begins after a token of `sentence_ends`, a paragraph (and with it a sentence) after one of
    `paragraph_ends`. A caller that knows the numbers gives them (`places` of a language model and of a `SegmentLoop`),
    for all tokens or some: the others count on from the token before them. Only differences count; from token to token,
    and from segment to segment, numbers stay or rise by one.

    Args:
        width: D. heads: H.
        length, eval_length, same_length, clamp, keep: as of `TransformerXL`; `clamp` in each channel.
        sentence_ends: token ids that end a sentence. paragraph_ends: token ids that end a paragraph.
        widths: channels of the code of tokens, sentences and paragraphs; the paper's when None: an even third each,
            and the rest for paragraphs.
        shift: "exact"; or "official" for the distances of the released code, to run its checkpoints: they let every
            token of a segment know where later sentences end.
        allow_leak: let a causal model have shift="official"; a loss measured with it is too low.
        causal: of the model, which hands it over; without, keys after a token have distances below 0.
    """

    needs = frozenset({"state", "context", "token_ids"})
    takes_places = True  # positions may have two more channels: the numbers of each token, below 0 for none

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        sentence_ends: Sequence[int] = (),
        paragraph_ends: Sequence[int] = (),
        eval_length: int | None = None,
        same_length: bool = False,
        clamp: int | None = None,
        keep: Literal["hidden", "kv"] = "hidden",
        widths: Sequence[int] | None = None,
        shift: str = "exact",
        allow_leak: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        for name, ends in {"sentence_ends": sentence_ends, "paragraph_ends": paragraph_ends}.items():
            if any(token < 0 for token in ends):
                raise ValueError(f"{name}={tuple(ends)} must be token ids, none of them below 0")
        if shift == "official" and not causal:
            raise ValueError(
                "shift='official' holds the distances of a causal model, and this one is none; take shift='exact'"
            )
        if shift == "official" and not allow_leak:
            raise ValueError(
                "shift='official' shows every token of a segment where later sentences end, so that a loss measured "
                "with it means nothing; take shift='exact', or allow_leak=True to run the released code's checkpoints"
            )
        if allow_leak and shift != "official":
            raise ValueError(f"allow_leak=True is for shift='official'; shift={shift!r} shows no token its future")
        self.width, self.heads = width, heads
        self.sentence_ends = tuple(sorted({*sentence_ends, *paragraph_ends}))
        self.paragraph_ends = tuple(sorted(set(paragraph_ends)))
        if shift == "official":
            self.whole_segments = "shift='official' shows a token where later sentences end"
        self.kept = {"length": length, "eval_length": eval_length, "same_length": same_length, "keep": keep}
        self.placed = {"clamp": clamp, "widths": widths, "shift": shift, "signed": not causal}

    def layer_memory(self, index: int) -> SegatronLayer:
        return SegatronLayer(self.width, self.heads, relative=False, **self.kept)  # type: ignore[arg-type]

    def position_scheme(self) -> Positions:
        return SegatronPositions(self.heads, self.width // self.heads, **self.placed)  # type: ignore[arg-type]

    def init_state(self, batch_size: int, like: Tensor) -> SegatronState:
        zeros = torch.zeros(2, batch_size, dtype=torch.long, device=like.device)
        return SegatronState(*zeros)

    def open(self, state: SegatronState, tokens: Tokens, layers: Sequence[Projections]) -> SegatronState:
        return state

    def enter(self, opened: SegatronState, tokens: Tokens) -> Entry:
        inputs, padding_BN = tokens.inputs_BN, tokens.padding_BN
        if inputs is None:
            raise ValueError("memory 'segatron' finds sentences by token ids; call the stack with inputs=token_ids")
        clock_BN1, given_BN2 = tokens.positions_BNP[..., :1], tokens.positions_BNP[..., 1:]
        here, behind = [], []
        for channel, ends in enumerate((self.sentence_ends, self.paragraph_ends)):
            ended_BN = torch.zeros_like(inputs, dtype=torch.bool)
            for token in ends:
                ended_BN = ended_BN | (inputs == token)
            if padding_BN is not None:
                ended_BN = ended_BN & ~padding_BN
            behind_BN = opened[channel][:, None] + ended_BN.cumsum(1)
            if given_BN2.shape[-1]:
                given_BN = given_BN2[..., channel]
                if padding_BN is not None:
                    given_BN = given_BN.masked_fill(padding_BN, -1)
                behind_BN = _counted_on(given_BN, behind_BN, ended_BN)
                before_BN = torch.cat([opened[channel][:, None], behind_BN[:, :-1]], 1)
                leaps_BN = ((given_BN - before_BN).abs() > 1) & (clock_BN1[..., 0] > 0)
                insist(
                    ~(leaps_BN & (given_BN >= 0)).any(),
                    "a number in places leaps; from token to token those of sentences and paragraphs stay or rise by "
                    "one, and go on in the next segment; reset a row that begins anew",
                )
            behind.append(behind_BN)
            here.append(behind_BN - ended_BN.long())
        # The numbers after each token come along for `exit`, which has no token ids to find the next ones by.
        positions_BNP = torch.cat([clock_BN1, torch.stack([*here, *behind], -1)], -1)
        return Entry(tokens._replace(positions_BNP=positions_BNP))

    def advance(self, opened: SegatronState, x_BND: Tensor, traces: Sequence[Trace]) -> SegatronState:
        positions_BNP = traces[0].query.positions_BNP
        assert positions_BNP is not None
        return SegatronState(*positions_BNP[:, -1, CHANNELS:].unbind(-1))

    def exit(self, state: SegatronState, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, SegatronState, None]:
        return x_BND, self.advance(state, x_BND, traces), None


def _counted_on(given_BN: Tensor, behind_BN: Tensor, ended_BN: Tensor) -> Tensor:
    """Numbers after each token, from the last token on whose own number is given (not below 0)."""
    known_BN = given_BN >= 0
    more_BN = torch.where(known_BN, given_BN - (behind_BN - ended_BN.long()), 0)
    place_N = torch.arange(1, given_BN.shape[1] + 1, device=given_BN.device)
    last_BN = torch.where(known_BN, place_N, 0).cummax(1).values
    return behind_BN + F.pad(more_BN, (1, 0)).gather(1, last_BN)


def paper_widths(width: int) -> tuple[int, int, int]:
    """Channels of the code of tokens, of sentences (an even third each), and of paragraphs (the rest)."""
    third = width // 3 + width // 3 % 2
    return third, third, width - 2 * third
