"""Does it fit? What a core can, what a memory needs and what a host asks, in the same few words, compared in one place.

    a core `can`        a set of words, which may depend on its options
    a memory `needs`    likewise
    a layer asks        by what it is made for: causal, positions that act on the logits, fewer keys than queries
    a host offers       what somebody else's model lets a memory do

`refuse_misfit` is asked when a model is built, or a layer of somebody else's model is changed, and names in its message
who needs what of whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CORE_WORDS: dict[str, str] = {
    "causal": "a causal form, in which no output depends on a later token",
    "bidirectional": "a form in which tokens see later ones",
    "cross": "other keys than queries",
    "bias": "a bias on the logits, or a mask of who sees whom",
    "context": "keys and values beside those of the segment",
    "exact_padding": "the same outputs with padding as without",
    "lse": "the log-sum-exp of the logits, by which two softmaxes become one",
    "weights": "the attention weights of the keys",
}
"""What an attention core may be able to do."""

PLACE_WORDS: dict[str, str] = {
    "state": "a state that is carried from segment to segment",
    "head": "a second result per head, mixed with the attention's",
    "in_front": "a result per head, mixed with the layer's input before queries, keys and values are made of it",
    "context_alone": "layers whose tokens attend the memory and nothing of their own segment",
    "kv_projection": "keys and values made of stored hidden states by the layer's own projections",
    "stored_kv": "keys and values, of as many heads as the queries, to be stored in the place of hidden states",
    "tokens_round": "tokens of the memory round those of the segment",
    "slots": "a cross-attention over slots in every block",
    "slots_in_front": "slots that are read in front of blocks, which get what was read in the place of their tokens",
    "own_weights": "weights of their own for the memory's tokens in every block",
    "memory_first": "blocks that renew the memory's tokens before those of the segment see them",
    "token_ids": "the token ids of the segment",
    "token_map": "tokens that are a map of a height and a width",
    "pieces": "a segment that is read piece by piece, of which no token sees a later piece",
    "whole_segment": "tokens that see the rest of their segment",
    "layer_traces": "what every layer makes of the segment",
    "own_loss": "a loss of its own beside the model's",
}
"""What a memory may need of the place where it stands, beside what it needs of the core."""

PHRASES: dict[str, str] = {
    "causal": "causal",
    "cross": "other keys than queries",
    "bias": "bias",
    "context": "keys of a memory",
    "exact_padding": "exact padding",
    "lse": "log-sum-exp",
    "weights": "weights of keys",
}
"""The words of a core, in a list for people."""

STANDS: dict[str, str] = {
    **{"tokens_round": "input", "context": "kv", "head": "head", "in_front": "head"},
    **{"slots": "sublayer", "slots_in_front": "sublayer"},
}
"""The usual names of the four places, by the word of `needs` that asks for them."""

WORDS = CORE_WORDS | PLACE_WORDS


def in_words(can: Iterable[str]) -> str:
    """What a core can, as a phrase."""
    can = set(can)
    phrases = [phrase for word, phrase in PHRASES.items() if word in can]
    if "bidirectional" not in can:
        phrases = ["causal alone" if phrase == "causal" else phrase for phrase in phrases]
    return ", ".join(phrases) or "only what all can"


def check_words(words: Iterable[str], whose: str) -> frozenset[str]:
    """The words as a set; a word that nobody knows is a mistake in the class that says it (ValueError)."""
    found = frozenset(words)
    if unknown := sorted(found - WORDS.keys()):
        raise ValueError(f"{whose} says {', '.join(unknown)}; the words are {', '.join(WORDS)}")
    return found


def misfit(needs: Mapping[str, str], can: Iterable[str], of: str, way_out: str = "") -> str | None:
    """What `refuse_misfit` would say; None where all fits."""
    word = next((word for word in needs if word not in can), None)
    if word is None:
        return None
    tail = f"; {way_out}" if way_out else ""
    return f"{needs[word]} needs {word} ({WORDS[word]}), which {of} does not give{tail}"


def refuse_misfit(needs: Mapping[str, str], can: Iterable[str], of: str, way_out: str = "") -> None:
    """Refuse what does not fit.

    Args:
        needs: who needs it, by word ("memory TransformerXL", "a causal layer").
        can: words of the one that is asked. of: who that is ("attention Linformer").
        way_out: what to do instead.

    Raises:
        ValueError: a word is missing; the message says which, to whom, and what it means.
    """
    why = misfit(needs, can, of, way_out)
    if why is not None:
        raise ValueError(why)
