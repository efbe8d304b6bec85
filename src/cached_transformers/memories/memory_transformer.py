"""Memory Transformer (Burtsev, Kuratov, Peganov, Sapunov 2020, arXiv:2006.11527; no code of the authors).

Learned vectors are beside the segment, and ordinary attention uses them as room for what concerns the whole of it.

    X = [memory; segment],  every layer as usual,  the outputs of the memory are dropped
    MemCtrl: tokens of the memory have projections and a feed-forward of their own in every layer
    MemBottleneck: H^mem = block^mem(X^mem; [X^mem, X^seq]),  H^seq = block^seq(X^seq; H^mem)  (layers/bottleneck.py)

Nothing of the memory crosses from one segment to the next; a Transformer-XL cache of the segment's tokens may be
beside it, which the memory's tokens neither enter nor see. In a causal model the memory is in front, where its tokens
see one another and nothing else: there they are a learned prefix, and gather nothing from the segment as they do in an
encoder.

Legend: B rows, N tokens, M memory tokens, C cached tokens, D model width, F width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Entry, LayerMemory, ModelMemory, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.memory_tokens import check_tokens, surround, visible_round
from .parts.options import one_of
from .transformer_xl import CacheBeforeTokens

own_word("own_weights", "weights of their own for the memory's tokens in every block")
own_word("memory_first", "blocks that update the memory's tokens before those of the segment see them")


@MEMORIES.register(
    "memory_transformer",
    paper="arXiv:2006.11527",
    title="Memory Transformer",
    carries="nothing: learned vectors beside each segment, a control",
    purpose="a control that carries nothing",
    equations="X = [memory; segment]; the memory's outputs are dropped; control: own weights for the memory's tokens; "
    "bottleneck: the segment's tokens attend the memory alone, once it has attended them",
    state="none; with a cache, per layer C (4 D + 8) + 8 bytes",
    cost="per token and layer: M / N (4 D^2 + 2 D F) + 2 D M (2 + M / N) multiply-adds on top of the layer",
    reach="the segment; with a cache, C tokens a layer more",
    gradient="within the segment",
    without={"bias": "mask='causal' without a cache", "context": "cache=0", "own_weights": "control=False"},
    probe=Probing(why="carries nothing from segment to segment, so it has to fail"),
)
class MemoryTransformer(ModelMemory):
    """Learned vectors beside every segment, which attention reads and writes; nothing is carried.

    A control for recurrent memories: as many tokens, no recurrence.

    Args:
        width: D. heads: H.
        length: M, memory tokens.
        place: "front" or "back" of the segment; causal models have only "front", since no token sees later ones.
        control: MemCtrl, own norms, projections and feed-forward for the memory's tokens; the weights are a copy's, see
            `MemoryWeights.copy_from` for a model that was trained without.
        bottleneck: MemBottleneck, tokens of the segment see one another through the memory alone, whose tokens are
            renewed first, by weights of their own: attention costs D (4 M + 2 M^2 / N) a token, and no D N. Not in
            causal models, where the memory would have seen every later token.
        mask: of a causal model: memory tokens see "full" their block, or in the "causal" order (no bias for the core).
        cache: C, tokens of a Transformer-XL memory in every layer, M places further back; 0 for none.
        causal: whether the model is causal (models say it themselves).
    """

    needs = frozenset({"tokens_round"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 10,
        *,
        place: str = "front",
        control: bool = False,
        bottleneck: bool = False,
        mask: str = "full",
        cache: int = 0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_tokens(length, mask, cache)
        one_of("place", place, ("front", "back"))
        if causal and place == "back":
            raise ValueError(
                "place='back' in a causal model puts the memory where no token sees it; take place='front', or "
                "memory='rmt', which carries the tokens after the segment into the next one"
            )
        if bottleneck and causal:
            raise ValueError(
                "bottleneck=True in a causal model shows each token later ones through the memory; take it in "
                "an encoder (sequence_classifier, encoder_decoder), or leave it out"
            )
        if bottleneck and (control or cache or place == "back"):
            given = "control=True" if control else f"cache={cache}" if cache else "place='back'"
            raise ValueError(
                f"bottleneck=True with {given}: its memory has weights of its own, is in front, and is all that "
                "tokens attend; leave one of them out"
            )
        self.length, self.place, self.extra_tokens = length, place, length
        self.width, self.heads, self.cache = width, heads, cache
        self.causal_model, self.full = causal, mask == "full"
        more = {"bias"} if (causal and self.full) or cache else set()
        self.needs = (
            self.needs | more | (CacheBeforeTokens.needs if cache else set()) | ({"own_weights"} if control else set())
        )
        if bottleneck:
            self.needs = frozenset({"tokens_round", "memory_first", "context_alone"})
            self.whole_segments = "bottleneck=True reads whole segments"
        self.initial_MD = nn.Parameter(torch.randn(length, width) / width**0.5)

    def open(self, state: State, tokens: Tokens, layers: Sequence[Projections]) -> bool:
        return True

    def advance(self, opened: bool, x_BND: Tensor, traces: Sequence[Trace]) -> bool:
        return False  # tokens before the segment were read

    def enter(self, opened: bool, tokens: Tokens) -> Entry:
        if not opened:
            return Entry(tokens)
        n, device = tokens.x_BND.shape[1], tokens.x_BND.device
        memory_BMD = self.initial_MD.expand(tokens.x_BND.shape[0], -1, -1)
        front_BMD, back_BMD = (memory_BMD, None) if self.place == "front" else (None, memory_BMD)
        surrounded = surround(tokens, front_BMD, back_BMD)
        return Entry(surrounded, segment=(self._start, n), visible_NN=self._visible(n, device))

    def _visible(self, n: int, device: torch.device) -> Tensor | None:
        """Attention mask; None where the model's own order gives it."""
        if self.causal_model and self.full:
            return visible_round(self.length, n, 0, device)
        if not self.cache:
            return None
        visible_LL = torch.ones(self.length + n, self.length + n, dtype=torch.bool, device=device)
        return visible_LL.tril() if self.causal_model else visible_LL

    def layer_memory(self, index: int) -> LayerMemory:
        if not self.cache:
            return LayerMemory()
        return CacheBeforeTokens(self.width, self.heads, self.cache, front=self._start, read_by_all=False)

    @property
    def _start(self) -> int:
        """Place of the segment's first token."""
        return self.length if self.place == "front" else 0

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, None]:
        return x_BND.narrow(1, self._start, x_BND.shape[1] - self.length), state, None
