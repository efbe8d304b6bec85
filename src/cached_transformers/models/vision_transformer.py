"""Vision Transformer (arXiv:2010.11929) with a memory in every layer.

Legend: B rows, N tokens (class token and patches), D model width, H image height, W image width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import at_least_one
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.memories import MemorySpec
from cached_transformers.positions import LearnedPositions
from cached_transformers.registry import MODELS

from .documents import check_suits
from .initial_weights import initialise
from .inputs import check_images
from .stack_model import StackModel, make_stack
from .stack_options import StackOptions


@MODELS.register("vision_transformer", paper="arXiv:2010.11929")
class VisionTransformer(StackModel):
    """Image classifier: patches, class token, learned positions, pre-norm blocks.

    Args:
        image_size: side of the square image in pixels. patch_size: side of a patch. channels: of the image.
        classes: number of outputs. width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        options: see `StackOptions`, for the stack. By default a memory's cache has one slot per token.

    Raises:
        ValueError: mismatched sizes, unknown names, images of another size.
    """

    answers_once = True  # one output per row: no packed documents

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int = 3,
        classes: int = 1000,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        feed_forward: int = 1536,
        *,
        memory: MemorySpec = None,
        attention: AttentionSpec = "softmax",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        reversible: bool = False,
    ) -> None:
        super().__init__()
        stack = StackOptions.among(locals())
        at_least_one(image_size=image_size)
        if image_size % patch_size:
            raise ValueError(f"image_size={image_size} must be a multiple of patch_size={patch_size}")
        side = image_size // patch_size
        self.image_size, self.channels, self.size = image_size, channels, (side, side)
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = LearnedPositions(side * side + 1, width)
        self.dropout = nn.Dropout(stack.dropout)
        self.stack = make_stack(stack, gives=("token_map",), length=side * side + 1, prefix=1, memory_size=self.size)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(
        self,
        inputs_BCHW: Tensor,
        state: StackState | None = None,
        *,
        padding: Tensor | None = None,
        documents: None = None,
    ) -> ModelOutput:
        """Logits (B, classes) of images (B, C, H, W).

        With a state, each row is a sequence of images: learned positions restart with each image, positions in the
        layers continue.

        Raises:
            ValueError: images of another shape or dtype, padding or documents, or a state of another model.
        """
        if documents is not None:
            check_suits(self)
        check_images(inputs_BCHW, self.channels, (self.image_size, self.image_size))
        self.check_state(state, len(inputs_BCHW))
        if padding is not None:
            raise ValueError("images have no padding; call the model without it")
        x_BND = self.patches(inputs_BCHW).flatten(2).transpose(1, 2)
        x_BND = torch.cat([self.class_token.expand(x_BND.shape[0], -1, -1), x_BND], 1)
        x_BND = self.dropout(x_BND + self.positions.weight)
        out = self.stack(x_BND, state, inputs=inputs_BCHW, size=self.size)
        return out._replace(outputs=self.head(out.outputs[:, 0]))
