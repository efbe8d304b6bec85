"""Target texts from an encoder-decoder: beam search with a KV cache (arXiv:1409.3215; length normalisation as in
arXiv:1609.08144 and fairseq: log-probability / length ** penalty).

Keys and values of the source are computed once for all continuations of a sentence, those of the target once per token
(`DecoderCache`); finished rows leave the batch.

Legend: B rows, N source tokens, K beams, L results, T new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cached_transformers.checks import comparing_lengths
from cached_transformers.models.beam_search import search
from cached_transformers.models.encoder_decoder import Encoded
from cached_transformers.models.generation import evaluating
from cached_transformers.state import State

if TYPE_CHECKING:
    from cached_lab.data.subwords import PairTokenizer
    from cached_transformers.models.encoder_decoder import EncoderDecoder


class Translation(NamedTuple):
    """New tokens with their lengths and scores.

    Attributes:
        tokens_BT: new tokens, without `begin`, filled up with `end`.
        length_B: new tokens per row, with `end` unless it reached the limit.
        score_B: log-probability of the row's new tokens, not divided by the length.
        state: the encoder's state after the sources.
    """

    tokens_BT: Tensor
    length_B: Tensor
    score_B: Tensor
    state: State

    def texts(self, tokenizer: PairTokenizer) -> list[tuple[str, float]]:
        """Return text and log-probability of each row."""
        rows = zip(self.tokens_BT.tolist(), self.length_B.tolist(), self.score_B.tolist(), strict=True)
        return [(tokenizer.decode(ids[:length]), score) for ids, length, score in rows]


@torch.no_grad()
def translate(
    model: EncoderDecoder,
    inputs_BN: Tensor,
    *,
    padding: Tensor | None = None,
    begin: int,
    end: int,
    beams: int = 5,
    tokens: int | None = None,
    length_penalty: float = 1.0,
    state: State | None = None,
) -> Translation:
    """Generate the target of each source in evaluation mode and without gradients; the model's mode is restored.

    A row ends when K of its continuations have reached `end` while among the K best (fairseq's rule, and transformers'
    with `early_stopping=True`), or after its last token, where unfinished continuations count as they are.

    Args:
        model: an encoder-decoder.
        inputs_BN: source tokens. padding: (B, N) bool, True = padding.
        begin: first token of the decoder. end: token after which a row stops.
        beams: K; 1 takes the likeliest token at each step.
        tokens: T, the most new tokens, `end` included; None: 2 N + 10 for a source of N tokens without padding, at most
            the model's `max_length`.
        length_penalty: the result has the highest log-probability / length ** length_penalty; 0 compares sums, which
            favour short texts.
        state: the encoder's state after earlier sources; None at the beginning. It is not changed.

    Raises:
        ValueError: an argument out of its range, or sources refused by `EncoderDecoder.encode`.
    """
    check_search(model, begin, end, beams, tokens, length_penalty)
    with evaluating(model):
        encoded = model.encode(inputs_BN, padding, state)
        first_B = torch.full((len(inputs_BN),), begin, device=inputs_BN.device)
        text = CachedTarget(model, encoded, first_B)
        limit_B = _limits(inputs_BN, padding, tokens, model.max_length)
        best = search(text, text.read(), limit_B, beams, end, length_penalty)
    longest = int(best.length_BL.max())
    return Translation(best.tokens_BLT[:, 0, :longest], best.length_BL[:, 0], best.score_BL[:, 0], encoded.state)


class CachedTarget:
    """Targets with a KV cache, as text of a `search`."""

    def __init__(self, model: EncoderDecoder, encoded: Encoded, first_B: Tensor) -> None:
        self.model, self.cache, self.token_B = model, model.begin(encoded), first_B

    def after(self) -> State:
        return ()

    def read(self) -> Tensor:
        logits_BKV = self.model.step(self.token_B.view(-1, self.cache.continuations), self.cache)
        logits_BV = logits_BKV.flatten(0, 1)
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)).log_softmax(-1)

    def append(self, token_B: Tensor) -> None:
        self.token_B = token_B

    def multiply(self, times: int) -> None:
        self.cache.multiply(times)
        self.token_B = self.token_B.repeat_interleave(times, 0)

    def choose(self, rows_B: Tensor) -> None:
        rows_BK = rows_B.view(-1, self.cache.continuations)
        self.cache.choose(rows_BK[:, 0] // rows_BK.shape[1], rows_BK % rows_BK.shape[1])
        self.token_B = self.token_B[rows_B]


def _limits(inputs_BN: Tensor, padding: Tensor | None, tokens: int | None, longest: int) -> Tensor:
    """(B,): the most new tokens per row."""
    rows, n = inputs_BN.shape
    if tokens is not None:
        return torch.full((rows,), tokens, device=inputs_BN.device)
    source_B = torch.full((rows,), n, device=inputs_BN.device) if padding is None else (~padding).sum(1)
    return (2 * source_B + 10).clamp(max=longest)


def check_search(
    model: EncoderDecoder, begin: int, end: int, beams: int, tokens: int | None, length_penalty: float
) -> None:
    """Refuse options of `translate` out of their range (ValueError)."""
    last = model.target_vocabulary - 1
    for name, token in {"begin": begin, "end": end}.items():
        if not 0 <= token <= last:
            raise ValueError(f"{name}={token} is not in the target vocabulary of {last + 1} tokens, 0 to {last}")
    if not 1 <= beams <= last + 1:
        raise ValueError(f"beams={beams} must lie in 1..{last + 1}, the tokens of the target vocabulary")
    if tokens is not None and not 1 <= tokens <= model.max_length:
        raise ValueError(
            f"tokens={tokens} must lie in 1..{model.max_length}, max_length of the model; None takes twice the "
            "source's length and 10"
        )
    comparing_lengths(length_penalty=length_penalty)
