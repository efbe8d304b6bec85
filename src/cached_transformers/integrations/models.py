"""Models of timm and transformers by name, with a memory added; `create_model` builds them and this package's own.

Importing this module fills `registry.MODELS`; it imports neither timm nor transformers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from cached_transformers.annotations import shown
from cached_transformers.extras import refused_by, require
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories import OneMemory
from cached_transformers.models.documents import read_documents
from cached_transformers.models.generation import Generation, generate
from cached_transformers.models.inputs import check_tokens
from cached_transformers.models.segments import begun, host_reader
from cached_transformers.registry import MODELS
from cached_transformers.state import State

from .adapters import add_memory
from .frozen_host import freeze_host
from .memory_hooks import cache_name


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a registered model by name.

    Args:
        name: "language_model", "vision_transformer", "timm", ... (`MODELS.names()` lists them).
        **kwargs: options of the model; its class documents them.

    Raises:
        ValueError: unknown name or option, with a suggestion; or values that do not fit together.
    """
    return MODELS.create(name, **kwargs)


@MODELS.register("timm")
class TimmModel(nn.Module):
    """A timm image classifier by name, through `add_memory`.

    Args:
        architecture: name in timm, e.g. "vit_small_patch16_224", or in `timm_models.py`, e.g. "pvt_tiny".
        classes: number of outputs.
        memory: None, a name, or {"name": ..., option: value}.
        pretrained: load timm's published weights (needs network).
        options: passed on to timm.create_model (drop_path_rate, img_size, ...).
    """

    def __init__(
        self,
        architecture: str = "vit_small_patch16_224",
        classes: int = 1000,
        memory: OneMemory | None = None,
        pretrained: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        timm = require("timm", extra="vision")
        from .timm import timm_models  # noqa: F401  (registers our models in timm)

        if not timm.is_model(architecture):
            raise ValueError(f"architecture={architecture!r}: timm knows no such model; timm.list_models() lists them")
        with refused_by("timm", f"architecture={architecture} with {shown(options)}"):
            self.model = timm.create_model(architecture, pretrained=pretrained, num_classes=classes, **options)
        if memory is not None:
            add_memory(self.model, memory)
        self.remembers = hasattr(self.model, "init_memory_state")
        if self.remembers:
            vars(self)["for_loops"] = vars(self.model)["for_loops"]

    def init_state(self, batch_size: int) -> State:
        """State of rows that have seen no frame; empty unless a memory carries one."""
        return self.model.init_memory_state(batch_size) if self.remembers else ()

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Switch timm's own gradient checkpointing."""
        self.model.set_grad_checkpointing(enabled)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that timm exempts from weight decay: positions, class tokens, relative positions."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    def forward(self, inputs_BCHW: Tensor, state: Any = None, *, padding: Tensor | None = None) -> ModelOutput:
        """Logits (B, classes) of images (B, C, H, W).

        Args:
            state: the memory's state after the frames before these, if it carries one; None for the first frames in
                evaluation.

        Raises:
            ValueError: no state where the images train a memory that carries one.
        """
        if self.remembers:
            return self.model(inputs_BCHW, memory_state=state)  # type: ignore[no-any-return]
        logits = self.model(inputs_BCHW)
        return ModelOutput(logits, (), logits.new_zeros(()))


@MODELS.register("transformers")
class TransformersModel(nn.Module):
    """A decoder of transformers as a language model of this package, through `add_memory`.

    It works in `SegmentLoop`, `read_stream` and recipes, and reads one segment a call; positions begin again with each.
    These loops, and `generate`, wrap a decoder that has a memory with a state in it themselves.

    Args:
        vocabulary: V. Ignored if `pretrained` or `model` is given, which have their own.
        architecture: type of the model in transformers, "gpt2" or "llama".
        memory: None, the name of a memory that such a decoder takes ("grc_stream", "memorizing", "rmt", ...), or
            {"name": ..., option: value}.
        pretrained: published weights by name, or a folder (may need network); None for random ones.
        trained: "all" weights, or "memory": the host is frozen, and its weights are not in `state_dict`, which loads
            on the same host only; the memory's are float32, and a host in half precision runs under autocast.
        lora: rank of adapters (PEFT) in the projections that PEFT adapts by default, with trained="memory"; 0 for none.
        model: a decoder with its head, with a memory or without; it is not copied. Its own `segment_length` cuts its
            inputs.
        options: of transformers' config (n_embd, n_layer, hidden_size, ...), or of its `from_pretrained`.

    Raises:
        ValueError: unknown architecture, options beside `model`, a model that predicts no next tokens, or an error of
            `add_memory`.
    """

    scores_last = steps_together = True
    """`forward` takes `last_only`, and `step` several tokens, which `generate` and `Session` use."""

    def __init__(
        self,
        vocabulary: int | None = None,
        architecture: str = "gpt2",
        memory: OneMemory | None = None,
        pretrained: str | None = None,
        model: nn.Module | None = None,
        trained: Literal["all", "memory"] = "all",
        lora: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        transformers = require("transformers", extra="language")
        if model is not None:
            if options or pretrained is not None:
                given = ", ".join([*options, *(["pretrained"] if pretrained is not None else [])])
                raise ValueError(f"model={type(model).__name__} has weights and a config of its own; leave out {given}")
            self.model, self.training = _with_head(model), model.training
        elif pretrained is not None:
            with refused_by("transformers", f"pretrained={pretrained} with {shown(options)}"):
                self.model = transformers.AutoModelForCausalLM.from_pretrained(pretrained, **options)
        else:
            if vocabulary is None:
                raise ValueError("vocabulary=None: give the number of token ids, or the name of pretrained weights")
            with refused_by("transformers", f"architecture={architecture} with {shown(options)}"):
                config = transformers.AutoConfig.for_model(architecture, vocab_size=vocabulary, **options)
                self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.vocabulary = int(self.model.config.vocab_size)
        self.cache_name = cache_name(self.model)
        if memory is not None:  # the caller cuts the text and carries the state
            add_memory(self.model, memory, segment_length=None)
        self.remembers = hasattr(self.model, "init_memory_state")
        self._half = trained == "memory" and self.model.dtype in (torch.bfloat16, torch.float16)
        if trained == "memory":
            freeze_host(self, self.model, lora)
        elif trained != "all" or lora:
            raise ValueError(f"trained={trained!r}, lora={lora}: take 'all', or 'memory' with adapters or without")

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Switch transformers' own activation checkpointing, not reentrant, which would detach the state."""
        old, new = ("gradient_checkpointing", "activation_checkpointing")  # in earlier and later versions
        name = new if hasattr(self.model, f"{new}_enable") else old
        if enabled:
            getattr(self.model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
        else:
            getattr(self.model, f"{name}_disable")()

    def init_state(self, batch_size: int) -> State:
        """State of rows that have seen nothing; empty without a memory."""
        return self.model.init_memory_state(batch_size) if self.remembers else ()

    def forward(
        self,
        inputs_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        last_only: bool = False,
        documents: Tensor | None = None,
    ) -> ModelOutput:
        """Logits (B, N, V) for the next token at each position of the segment; (B, 1, V) with `last_only`.

        Args:
            inputs_BN: token ids. state, reset, padding, documents: see `LanguageModel`.

        Raises:
            ValueError: a state of another model or number of rows; documents in a compiled call, or a document that
                begins again.
        """
        check_tokens("inputs", inputs_BN, self.model.config.vocab_size)
        state = begun(self, state, reset, inputs_BN.shape[0]) if self.remembers else ()
        if documents is not None:
            out = read_documents(self._read, documents, padding, (inputs_BN,), state, self.init_state)
            return out._replace(outputs=out.outputs[:, -1:]) if last_only else out
        return self._read(inputs_BN, state, padding, last_only)

    def _read(self, inputs_BN: Tensor, state: State, padding: Tensor | None, last_only: bool = False) -> ModelOutput:
        """`forward` of rows of one text each."""
        more: dict[str, Any] = {"memory_state": state} if self.remembers else {}
        mask = None if padding is None else (~padding).to(torch.long)
        keep = 1 if last_only else 0
        with self._autocast():
            out = self.model(input_ids=inputs_BN, attention_mask=mask, use_cache=False, logits_to_keep=keep, **more)
        return ModelOutput(out.logits, out.memory_state if self.remembers else (), out.logits.new_zeros(()))

    def _autocast(self) -> torch.autocast:
        """The context of a half-precision host with a memory in float32."""
        return torch.autocast(self.model.device.type, self.model.dtype if self._half else None, enabled=self._half)

    def why_in_one_piece(self) -> None:
        """None: `begin` and `step` decode token by token."""

    def begin(self, state: State, continuations: int = 1, *, steps: int = 32) -> HostDecoder:
        """Begin a segment for `step`; see `LanguageModel.begin`."""
        return HostDecoder(state)

    def step(self, inputs_BN: Tensor, opened: HostDecoder) -> Tensor:
        """Logits (B, V) after the next tokens of a partial segment, any number at a time."""
        check_tokens("inputs", inputs_BN, self.model.config.vocab_size)
        given = {"memory_state": opened.state} if opened.kv is None else {self.cache_name: opened.kv}
        with self._autocast():
            out = self.model(input_ids=inputs_BN, use_cache=True, logits_to_keep=1, **given)
        opened.kv = out[self.cache_name]
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def ask_prompt(self, inputs_BN: Tensor, state: State) -> State:
        """Return the state with the choice of a prompt's last segment; see `interfaces.incremental`."""
        return host_reader(self.model).ask_prompt(inputs_BN, state) if self.remembers else state  # type: ignore[no-any-return]

    def generate(self, prompt_BN: Tensor, state: State | None = None, **options: Any) -> Generation:
        """Continue a text; see `cached_transformers.models.generation.generate` for the options."""
        return generate(self, prompt_BN, state, **options)


class HostDecoder:
    """A partial segment that a host with a memory reads token by token.

    Attributes:
        state: before the segment. kv: the `MemoryCache` of the segment; None before the first token.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.kv: Any = None

    @property
    def state_after(self) -> State | None:
        """The state after all tokens, where the host has computed it already."""
        return self.kv.state_after

    def choose(self, rows_B: Tensor) -> None:
        """Reorder rows."""
        self.kv.reorder_cache(rows_B)

    def multiply(self, times: int) -> None:
        """Repeat each row."""
        self.kv.batch_repeat_interleave(times)


def _with_head(model: Any) -> Any:
    """The model, if it predicts next tokens (otherwise ValueError)."""
    generates = hasattr(type(model), "_expand_inputs_for_generation")  # one that fills masks sees later tokens
    if not generates or model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(
            f"model={type(model).__name__} predicts no next tokens; give a decoder of transformers with its head, as "
            "GPT2LMHeadModel"
        )
    return model
