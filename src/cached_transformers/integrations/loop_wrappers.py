"""Classifiers of images with a memory in the form that segment loops call: a state in, and a `ModelOutput` out.

Decoders are language models (`models.TransformersModel`); an encoder of texts reads the segments of a document itself.

Legend: B rows, T frames, C channels, H height, W width, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.models.segments import begun
from cached_transformers.state import State, used_again
from cached_transformers.state import reset as replace_rows


class FramesModel(nn.Module):
    """A classifier of images with an answer for each frame of a video.

    Args:
        model: of timm or transformers, with a memory that carries a state; it is not copied.
    """

    predicts_next = False
    """The model sees later tokens, which loops that predict the next token refuse."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.training = model.training

    def init_state(self, batch_size: int) -> State:
        """State of rows that have seen nothing."""
        return self.model.init_memory_state(batch_size)

    def forward(
        self,
        inputs_BTCHW: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        *,
        padding: Tensor | None = None,
    ) -> ModelOutput:
        """Logits (B, T, V) of each frame, which the model has read after those before it.

        Args:
            inputs_BTCHW: videos.
            state: state after the last frames; None for the start of videos.
            reset: (B,) bool, rows that begin a new video and forget.
            padding: (B, T) bool, True = no frame, which leaves the row's state as it is.

        Raises:
            ValueError: the inputs are no videos; the model has no classifier.
        """
        if inputs_BTCHW.dim() != 5:
            shape = tuple(inputs_BTCHW.shape)
            raise ValueError(f"inputs of shape {shape} are no videos, (rows, frames, channels, height, width)")
        state = begun(self, state, reset, len(inputs_BTCHW))
        answers = []
        for index, frames_BCHW in enumerate(inputs_BTCHW.unbind(1)):
            with used_again():  # by rows without a frame
                out = self.model(frames_BCHW, memory_state=state)
            if not isinstance(out, ModelOutput):  # of transformers
                if getattr(out, "logits", None) is None:
                    raise ValueError(f"{type(self.model).__name__} classifies nothing; give a model with a head")
                out = ModelOutput(out.logits, out.memory_state, out.logits.new_zeros(()))
            answers.append(out.outputs)
            state = out.state if padding is None else replace_rows(out.state, state, padding[:, index])
        return ModelOutput(torch.stack(answers, 1), state, answers[0].new_zeros(()))
