"""Host models with a memory in the form that segment loops call: a state in, and a `ModelOutput` out.

Decoders are language models (`models.TransformersModel`). The models here answer for the tokens of a text or the frames
of a video that they see.

Legend: B rows, N tokens, T frames, C channels, H height, W width, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.models.segments import begun
from cached_transformers.state import State, used_again
from cached_transformers.state import reset as replace_rows


class HostWrapper(nn.Module):
    """Base class.

    Args:
        model: a host with a memory that carries a state; it is not copied.

    Attributes:
        predicts_next: False: the model sees later tokens, which loops that predict the next token refuse.
    """

    predicts_next = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.training = model.training

    def init_state(self, batch_size: int) -> State:
        """State of rows that have seen nothing."""
        return self.model.init_memory_state(batch_size)


class TokensModel(HostWrapper):
    """An encoder of texts with an answer for each token.

    Args:
        model: of transformers, with a head for tokens (masked tokens, tags).
    """

    def forward(
        self,
        inputs_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        *,
        padding: Tensor | None = None,
    ) -> ModelOutput:
        """Logits (B, N, V) at each position of the segment.

        Args:
            inputs_BN: token ids.
            state: state after the last segment; None for the start of documents.
            reset: (B,) bool, rows that begin a new document and forget.
            padding: (B, N) bool, True = padding.

        Raises:
            ValueError: the model does not answer for each token.
        """
        state = begun(self, state, reset, inputs_BN.shape[0])
        mask = None if padding is None else (~padding).to(torch.long)
        out = self.model(input_ids=inputs_BN, attention_mask=mask, memory_state=state)
        logits = getattr(out, "logits", None)
        if logits is None or logits.shape[:2] != inputs_BN.shape:
            raise ValueError(
                f"{type(self.model).__name__} does not answer for each token, as loops over segments need; call it "
                "with whole documents, which its own segment_length cuts"
            )
        return ModelOutput(logits, out.memory_state, logits.new_zeros(()))


class FramesModel(HostWrapper):
    """A classifier of images with an answer for each frame of a video.

    Args:
        model: of timm or transformers.
    """

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
                    raise ValueError(
                        f"{type(self.model).__name__} classifies nothing; give a model with a head, as "
                        "ViTForImageClassification"
                    )
                out = ModelOutput(out.logits, out.memory_state, out.logits.new_zeros(()))
            answers.append(out.outputs)
            state = out.state if padding is None else replace_rows(out.state, state, padding[:, index])
        return ModelOutput(torch.stack(answers, 1), state, answers[0].new_zeros(()))
