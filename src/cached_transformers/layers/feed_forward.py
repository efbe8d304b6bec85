"""The position-wise feed-forward sublayer.

Legend: B rows, N tokens, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from cached_transformers.memories.parts.late_gradients import mapped

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),  # what Flax and TensorFlow call gelu
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
GATED = "gated_"
"""Before the name of an activation: a gated feed-forward (arXiv:2002.05202)."""


class FeedForward(nn.Module):
    """norm -> linear -> activation -> linear, 2 B N D F multiply-adds.

    Args:
        width: D. hidden: F. norm: applied to the input; identity when None.
        activation: a name in `ACTIVATIONS`; after "gated_", multiplied with a second linear map of the input
            (arXiv:2002.05202, equation 6), 3 B N D F multiply-adds.
        dropout: on the result. activation_dropout: on the hidden units; None takes `dropout`.
        bias: of the linear maps.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: nn.Module | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
        activation_dropout: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        plain = activation.removeprefix(GATED)
        if plain not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation={activation!r} must be one of {names}, or one after 'gated_'")
        self.gated = plain != activation
        self.norm = norm if norm is not None else nn.Identity()
        self.enter = nn.Linear(width, hidden * (1 + self.gated), bias=bias)
        self.activation = ACTIVATIONS[plain]()
        self.leave = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        hidden = mapped(self.enter, self.norm(x_BND))
        if self.gated:
            hidden, factor = hidden.chunk(2, -1)
            hidden = self.activation(hidden) * factor
        else:
            hidden = self.activation(hidden)
        return self.dropout(mapped(self.leave, self.activation_dropout(hidden)))


def run_feed_forward(
    module: nn.Module, x_BND: Tensor, padding_BN: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Call a feed-forward and return its output and auxiliary loss or None.

    A module with the attribute `gives_loss = True` is called with the padding and returns both; other modules are
    called with the tokens only.
    """
    if not getattr(module, "gives_loss", False):
        return module(x_BND), None
    y_BND, loss = module(x_BND, padding_BN)
    return y_BND, loss


class DropPath(nn.Module):
    """Stochastic depth: drop a residual branch for whole rows in training and rescale (arXiv:1603.09382)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path={rate} must lie in [0, 1)")
        self.rate = rate

    def forward(self, x_BND: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x_BND
        keep = x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x_BND * keep / (1 - self.rate)
