"""Capability words: the abilities of attention mechanisms, the needs of memories, the offers of layers and host models.

| word | an attention mechanism (`can`) | a memory (`needs`), a layer, model or host (offers) |
| --- | --- | --- |
| causal | no output depends on a later token | the layer is causal |
| bidirectional | tokens see later ones | tokens see the rest of their segment |
| cross | keys and queries of different tokens | |
| context | keys and values beside the segment's | the same: stored, or made by the layer's projections |
| bias | a bias on the logits, or an attention mask | a mask of the memory's own |
| exact_padding | padding changes no output | |
| lse | the log-sum-exp of the logits | the same, in `Reading.lse_BHN` |
| weights | the attention weights | the same, in `Trace.weights_BHWL` |
| state | | a state passed from segment to segment |
| head | | a second result per head, mixed with the attention's |
| tokens_round | | memory tokens around the segment's tokens |
| slots | | a cross-attention over slots in every block |
| layer_traces | | the output of every layer for the segment |
| own_loss | | an auxiliary loss |

A memory with a need that no other one shares declares a word of its own in its file (`own_word`).
`refuse_misfit` compares the sets when a model is built or a host model is given a memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CORE_WORDS: dict[str, str] = {
    "causal": "a causal form, in which no output depends on a later token",
    "bidirectional": "tokens that see the rest of their segment",
    "cross": "other keys than queries",
    "context": "keys and values beside those of the segment",
    "bias": "a bias on the logits, or an attention mask",
    "exact_padding": "the same outputs with padding as without",
    "lse": "the log-sum-exp of the logits, which merges two softmaxes",
    "weights": "the attention weights of the keys",
}
"""Capabilities of an attention mechanism."""

PLACE_WORDS: dict[str, str] = {
    "state": "a state that is passed from segment to segment",
    "head": "a second result per head, mixed with the attention's",
    "tokens_round": "memory tokens around those of the segment",
    "slots": "a cross-attention over slots in every block",
    "layer_traces": "the output of every layer for the segment",
    "own_loss": "an auxiliary loss beside the model's",
}
"""Needs of a memory beyond those of the attention mechanism."""

OWN_WORDS: dict[str, str] = {}
"""Words that memories declare for themselves, filled by `own_word`."""

PHRASES: dict[str, str] = {
    "causal": "causal",
    "cross": "other keys than queries",
    "bias": "bias",
    "context": "keys of a memory",
    "exact_padding": "exact padding",
    "lse": "log-sum-exp",
    "weights": "weights of keys",
}
"""Words of an attention mechanism, in a list for people."""

PLACES: dict[str, str] = {
    **{"tokens_round": "input", "context": "kv", "head": "head", "in_front": "head"},
    **{"slots": "sublayer", "slots_in_front": "sublayer", "queries": "query"},
}
"""Usual names of the places where a memory acts, by the word in `needs`."""


def own_word(word: str, meaning: str) -> str:
    """Declare a need of one memory, to be named and explained in messages; return the word."""
    OWN_WORDS[word] = meaning
    return word


def in_words(can: Iterable[str]) -> str:
    """Describe the capabilities of an attention mechanism in a phrase."""
    can = set(can)
    phrases = [phrase for word, phrase in PHRASES.items() if word in can]
    if "bidirectional" not in can:
        phrases = ["only causal" if phrase == "causal" else phrase for phrase in phrases]
    return ", ".join(phrases) or "no options"


def misfit(needs: Mapping[str, str], can: Iterable[str], of: str, way_out: str = "") -> str | None:
    """Return the message of `refuse_misfit`; None if everything fits."""
    for word, part in needs.items():
        if word not in can:
            meaning = (PLACE_WORDS | OWN_WORDS | CORE_WORDS).get(word, "declared by no own_word()")
            tail = f"; {way_out}" if way_out else ""
            return f"{part} needs {word} ({meaning}), which {of} does not give{tail}"
    return None


def refuse_misfit(needs: Mapping[str, str], can: Iterable[str], of: str, way_out: str = "") -> None:
    """Refuse a combination that does not fit.

    Args:
        needs: for each word, the part that needs it ("memory TransformerXL", "a causal layer").
        can: words of the part that is asked. of: its name ("attention Linformer").
        way_out: an alternative for the user.

    Raises:
        ValueError: a word is missing; the message names both parts and explains the word.
    """
    why = misfit(needs, can, of, way_out)
    if why is not None:
        raise ValueError(why)
