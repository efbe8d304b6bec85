"""`memory_state` in the calls of a model of transformers: its forward, and its `generate`.

Legend: B rows, N tokens of a prompt, T tokens in all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.segment_context import ModelCall, release_checkpoints, running
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE
from cached_transformers.state import State, repeat

from .adapter_utils import parameter_names, refuse_misspelt
from .host_forward import OUTPUT, HostForward, prepare_outputs, with_state
from .packed_rows import WAY_OUT, refuse_pooled, refuse_told, score_within

ATTACHED = (
    *("forward", "segment_reader", "generate", "_expand_inputs_for_generation", "init_memory_state"),
    "for_loops",
)
"""Attributes of the instance, which hide those of its class."""


def replace_forward(module: nn.Module, forward: Callable[..., Any], first: Any, *more: str) -> None:
    """Replace a module's forward by a function with its first argument.

    As a partial it can be copied and pickled with the module, and torch.export, Trainer and generate find code and the
    host's signature, with the state and the keywords `more` in it.
    """
    own = inspect.signature(type(module).forward)
    parameters = [p for name, p in own.parameters.items() if name != "self"]
    place = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[place:place] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (OUTPUT, *more)
    ]
    replaced = functools.partial(forward, first)
    vars(replaced)["__signature__"] = own.replace(parameters=parameters)
    vars(module)["forward"] = replaced


def model_forward(
    place: tuple[Any, HostForward],
    *args: Any,
    memory_state: State | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of a model around its body; `place` is that model, and the body's forward."""
    model, body = place
    given = {**dict(zip(body.outside, args, strict=False)), **kwargs}
    refuse_misspelt(given)
    documents = body.documents(given)
    if documents is not None:
        args, kwargs = (), given
        if documents.plan is not None and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False  # some hosts ask their config otherwise
        if hasattr(type(model), "_expand_inputs_for_generation"):  # its loss is shifted
            score_within(kwargs, documents.ids_BM)
    call = ModelCall(body, memory_state, documents)
    calls = running()
    before, calls.model = calls.model, call
    try:
        out = type(model).forward(model, *args, return_dict=True, **kwargs)
    finally:
        calls.model = before
    if documents is not None and documents.plan is not None:
        refuse_pooled(model, out)
    if call.state_after is not None:
        out = with_state(out, call.state_after)
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    return out if return_dict else out.to_tuple()


def generate(
    place: tuple[Any, HostForward],
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *args: Any,
    memory_state: State | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' `generate` from the memory's state before the prompt; an output that is a dict holds the state
    after each row's text.

    Raises:
        ValueError: arguments that a memory cannot follow, and errors of transformers.
    """
    model, reader = place
    prompt = inputs if inputs is not None else kwargs.get("input_ids")
    why = "generate continues one text in each row;"
    refuse_told(kwargs, why)
    if reader.documents({"input_ids": prompt, "position_ids": kwargs.get("position_ids")}) is not None:
        raise ValueError(f"position_ids begin again inside a prompt: {why} {WAY_OUT}")
    for name in ("past_key_values", "inputs_embeds"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"generate with {name}: a model with a memory begins a segment; give input_ids and the last text's "
                "memory_state"
            )
    out = type(model).generate(model, inputs, generation_config, *args, memory_state=memory_state, **kwargs)
    if isinstance(out, Tensor):
        return out
    out[OUTPUT] = state_after(model, reader, out.sequences, prompt, memory_state, generation_config, kwargs)
    return out


@torch.no_grad()
def state_after(
    model: Any,
    reader: HostForward,
    tokens_BT: Tensor,
    prompt_BN: Tensor | None,
    state: State | None,
    config: Any,
    kwargs: dict[str, Any],
) -> State:
    """State of each row after its text, without its last token: it is read again, since a row that ended early was
    fed padding afterwards, and beams were reordered."""
    ends, pad = (_setting(model, config, kwargs, name) for name in ("eos_token_id", "pad_token_id"))
    ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
    rows, total = tokens_BT.shape
    length = 1 if prompt_BN is None else prompt_BN.shape[1]
    times = 1 if prompt_BN is None else rows // prompt_BN.shape[0]
    mask_BN = kwargs.get("attention_mask")
    if mask_BN is None and prompt_BN is not None and pad is not None and pad not in ends:
        mask_BN = (prompt_BN != pad).long()  # generate's default
    new_BT = tokens_BT[:, length:]
    ended_BT = torch.isin(new_BT, torch.tensor(ends, device=new_BT.device, dtype=new_BT.dtype))
    after_end_BT = ended_BT.long().cumsum(1) - ended_BT.long() > 0
    stops = kwargs.get("stopping_criteria") or _setting(model, config, kwargs, "stop_strings")
    if stops and pad is not None and pad not in ends:  # a row that these ended was fed padding afterwards
        after_end_BT = after_end_BT | ((new_BT == pad).flip(1).long().cumprod(1).flip(1) > 0)
    written_B = length + (~after_end_BT).sum(1)
    real_BT = torch.arange(total, device=tokens_BT.device) < written_B[:, None] - 1
    if mask_BN is not None:
        real_BT[:, :length] &= mask_BN.repeat_interleave(times, 0).bool()
    columns = max(1, int(real_BT.any(0).nonzero().max()) + 1) if bool(real_BT.any()) else 0
    before = reader.init_state(rows) if state is None else repeat(state, times)
    if columns == 0:
        return before
    call = {"attention_mask": real_BT[:, :columns].long()}
    if bool(call["attention_mask"].all()):
        del call["attention_mask"]
    return reader.forward(input_ids=tokens_BT[:, :columns], memory_state=before, use_cache=False, **call).memory_state


def expand(
    model: Any, expand_size: int = 1, *args: Any, memory_state: State | None = None, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """`_expand_inputs_for_generation`, which repeats only tensors for beams, of the state as well."""
    kind = type(model)
    # A method, or a static one before transformers 5.18: bound as the class would bind it.
    own = inspect.getattr_static(kind, "_expand_inputs_for_generation").__get__(model, kind)
    ids, kwargs = own(expand_size, *args, **kwargs)
    if memory_state is not None:
        kwargs[OUTPUT] = repeat(memory_state, expand_size)
    return ids, kwargs


def _setting(model: Any, config: Any, kwargs: dict[str, Any], name: str) -> Any:
    """A setting of generate: of the call, of its config, or of the model's."""
    for value in (kwargs.get(name), getattr(config, name, None), getattr(model.generation_config, name, None)):
        if value is not None:
            return value
    return None


def install(model: nn.Module, forward: HostForward) -> None:
    """Replace the calls of a model and of its body, on these instances."""
    ours: Any = model
    body: nn.Module = forward.body
    prepare_outputs(body, model)
    vars(body)["segment_reader"] = forward
    replace_forward(body, type(forward).forward, forward, *forward.keywords)
    if model is not body:
        forward.outside = parameter_names(model)
        replace_forward(model, model_forward, (model, forward), *forward.keywords)
    if hasattr(type(model), "_expand_inputs_for_generation"):
        vars(model)["generate"] = functools.partial(generate, (model, forward))
        vars(model)["_expand_inputs_for_generation"] = functools.partial(expand, model)
    vars(model)["init_memory_state"] = forward.init_state
    if forward.loop_wrapper is not None:
        vars(model)["for_loops"] = functools.partial(forward.loop_wrapper, model=model)
    ignored = [name for name in getattr(ours.config, "keys_to_ignore_at_inference", []) if name != OUTPUT]
    ours.config.keys_to_ignore_at_inference = [*ignored, OUTPUT]  # Trainer would gather the state as a prediction
    vars(body)["uninstall_memory"] = vars(model)["uninstall_memory"] = uninstall


def uninstall(module: nn.Module) -> None:
    """Undo `install` on one module."""
    forward: HostForward | None = vars(module).get("segment_reader")
    if forward is not None:
        forward.uninstall()
        release_checkpoints(module)
    for name in ATTACHED:
        vars(module).pop(name, None)
    module._modules.pop(INITIAL_STATE, None)  # a state of the memory that goes
    vars(module.config).pop("keys_to_ignore_at_inference", None)  # type: ignore[arg-type]
