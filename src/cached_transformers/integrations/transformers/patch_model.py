"""`memory_state` in the calls of a model of transformers: its forward, and its `generate`.

Legend: B rows, N tokens of a prompt, T tokens in all.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.memory_hooks import refuse_misspelt, rename_cache
from cached_transformers.integrations.segment_context import ModelCall, release_checkpoints, running
from cached_transformers.interfaces.incremental import asks
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE
from cached_transformers.state import State, repeat

from .adapter_utils import parameter_names
from .host_forward import OUTPUT, HostForward, is_exporting, prepare_outputs, with_state
from .memory_cache import Cache, MemoryCache
from .packed_rows import WAY_OUT, refuse_pooled, refuse_told, score_within

ATTACHED = ("forward", "segment_reader", "generate", "_expand_inputs_for_generation", "init_memory_state", "for_loops")
"""Attributes of the instance, which hide those of its class."""
UNDONE = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "penalty_alpha")
"""Settings of generate with which it reads tokens that the text may then not have."""


def called(reader: HostForward, forward: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a forward; with `past_key_values` outside of a compiled graph, which would serve only one length of them."""
    continues = any(isinstance(value, Cache) for value in (*args, rename_cache(kwargs, reader.cache_name)))
    if continues and torch.compiler.is_compiling() and not is_exporting():
        return reader.eagerly(forward, first, *args, **kwargs)
    return forward(first, *args, **kwargs)


def replace_forward(module: nn.Module, reader: HostForward, forward: Callable[..., Any], first: Any) -> None:
    """Replace a module's forward by a function with its first argument.

    As a partial it can be copied and pickled with the module, and torch.export, Trainer and generate find code and the
    host's signature, with the state and the reader's keywords in it.
    """
    own = inspect.signature(type(module).forward)
    parameters = [p for name, p in own.parameters.items() if name != "self"]
    place = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[place:place] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (OUTPUT, *reader.keywords)
    ]
    replaced = functools.partial(called, reader, forward, first)
    vars(replaced)["__signature__"] = own.replace(parameters=parameters)
    vars(module)["forward"] = replaced


def model_forward(
    place: Any, *args: Any, memory_state: State | None = None, return_dict: bool | None = None, **kwargs: Any
) -> Any:
    """The forward of a model around its body; `place` is that model, and the body's forward."""
    model, body = place
    given = {**dict(zip(body.outside, args, strict=False)), **kwargs}
    refuse_misspelt(model, args, given)
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
    place: tuple[Any, Any],
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
    cache = rename_cache(kwargs, reader.cache_name)
    names = list(inspect.signature(type(model).generate).parameters)[3:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, embedded = given.get("input_ids") if inputs is None else inputs, given.get("inputs_embeds")
    why = "generate continues one text in each row;"
    refuse_told(given, why)
    if reader.documents({"input_ids": ids, "position_ids": given.get("position_ids")}) is not None:
        raise ValueError(f"position_ids begin again inside a prompt: {why} {WAY_OUT}")

    def setting(name: str) -> Any:
        """A setting of the call, where None counts, of its config, or of the model's."""
        if name in given:
            return given[name]
        value = getattr(generation_config, name, None)
        return getattr(model.generation_config, name, None) if value is None else value

    for name in (*UNDONE, "dola_layers"):
        if setting(name):
            raise ValueError(f"{name}: a memory cannot forget tokens; generate greedily, by sampling or by beams")
    if (kind := setting("cache_implementation")) not in (None, "dynamic", "hybrid"):  # a hybrid one is no longer made
        raise ValueError(
            f"cache_implementation={kind!r}: a segment's keys and values need a cache that can begin again; give "
            "cache_implementation='dynamic'"
        )
    if embedded is not None and setting("prefill_chunk_size"):
        raise ValueError("prefill_chunk_size beside inputs_embeds: generate cuts only input_ids; leave one out")
    asking = asks(reader.memory)
    if asking and setting("use_cache") is False:
        raise ValueError(
            "use_cache=False: the choice of a prompt that asks first lasts as long as past_key_values; leave it out, "
            "or add the memory with retrieve='segments'"
        )
    prompt, mask = ids if embedded is None else embedded, given.get("attention_mask")
    text, first = reader.text_of(cache, memory_state, 1 if prompt is None else len(prompt)), 0
    if text.tokens:
        if setting("use_cache") is False:
            raise ValueError("use_cache=False beside past_key_values: all would be read again; leave one out")
        if prompt is not None and (embedded is not None or mask is None or mask.shape[1] == prompt.shape[1]):
            text.refuse_other_text(prompt)
            first = text.tokens
    text.reopen()
    before = copy.copy(text)
    before.kv = None
    columns = 1 if prompt is None else prompt.shape[1]
    calls = running()
    whole = first or not text.tokens
    calls.prompt_end = None if not asking else columns if whole else text.tokens + columns
    try:
        out = type(model).generate(model, inputs, generation_config, *args, memory_state=memory_state, **kwargs)
    finally:
        calls.prompt_end = None
    if isinstance(out, Tensor):
        return out
    listed = (1 if embedded is None else 0) if ids is None else ids.shape[1]
    new = out.sequences[:, listed:]
    prompt = out.sequences[:, :listed] if embedded is None else embedded
    out[OUTPUT] = state_after(reader, before, prompt[:, first:], new, given, setting)
    return out


@torch.no_grad()
def state_after(
    reader: Any, text: MemoryCache, prompt: Tensor, new_BT: Tensor, given: dict[str, Any], setting: Any
) -> State:
    """State of each row after its text, without its last token: it is read again, since a row that ended early was
    fed padding afterwards, and beams were reordered.

    Args:
        text: a copy of the text read so far. prompt: ids (B, N) or embeddings (B, N, D) that follow.
        given, setting: arguments of generate, and its settings by name.
    """
    (rows, total), columns, device = new_BT.shape, prompt.shape[1], new_BT.device
    mask, ends, pad = given.get("attention_mask"), setting("eos_token_id"), setting("pad_token_id")
    ends = torch.as_tensor([] if ends is None else ends, device=device, dtype=new_BT.dtype).flatten()
    pads = pad is not None and pad not in ends.tolist()
    if mask is None:  # generate's default
        mask = prompt != pad if pads and prompt.dim() == 2 else new_BT.new_ones(1, columns)
    ended_BT = torch.isin(new_BT, ends).long()
    after_end_BT = ended_BT.cumsum(1) - ended_BT > 0
    if pads and (given.get("stopping_criteria") or setting("stop_strings")):
        after_end_BT |= (new_BT == pad).flip(1).long().cumprod(1).flip(1) > 0  # fed after these ended the row
    times = rows // len(text.state.clock_B)
    text.batch_repeat_interleave(times)

    def copies(t: Tensor) -> Tensor:
        """The last columns of an argument, for all rows."""
        t = t[:, t.shape[1] - columns :]
        return t.repeat_interleave(rows // len(t), 0)

    name, follows = ("input_ids", new_BT) if prompt.dim() == 2 else ("inputs_embeds", reader.embed_ids(new_BT))
    call = {name: torch.cat([copies(prompt), follows], 1)[:, :-1]}
    steps = torch.arange(1, total, device=device)
    for name, rises in (("token_type_ids", 0), ("position_ids", 1)):  # generate lets them go on so
        if given.get(name) is not None:
            t = copies(given[name])
            call[name] = torch.cat([t, t[:, -1:] + rises * steps], 1)
    real_BT = steps <= (~after_end_BT).sum(1, keepdim=True) - 1
    real_BM = torch.cat([real_BT.new_ones(rows, text.tokens), copies(mask).bool(), real_BT], 1)
    if not bool(real_BM.all()):
        call["attention_mask"] = real_BM.long()
    return reader.forward(**call, past_key_values=text, use_cache=True).memory_state  # type: ignore[no-any-return]


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
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, MemoryCache) and expand_size > 1:
        cache.batch_repeat_interleave(expand_size)
    return ids, kwargs


def install(model: Any, forward: HostForward) -> None:
    """Replace the calls of a model and of its body, on these instances."""
    body: nn.Module = forward.body
    prepare_outputs(body, model)
    vars(body)["segment_reader"] = forward
    replace_forward(body, forward, type(forward).forward, forward)
    if model is not body:
        forward.outside = parameter_names(model)
        replace_forward(model, forward, model_forward, (model, forward))
    if hasattr(type(model), "_expand_inputs_for_generation"):
        vars(model)["generate"] = functools.partial(generate, (model, forward))
        vars(model)["_expand_inputs_for_generation"] = functools.partial(expand, model)
    vars(model)["init_memory_state"] = forward.init_state
    if forward.loop_wrapper is not None:
        vars(model)["for_loops"] = functools.partial(forward.loop_wrapper, model=model)
    ignored = [name for name in getattr(model.config, "keys_to_ignore_at_inference", []) if name != OUTPUT]
    model.config.keys_to_ignore_at_inference = [*ignored, OUTPUT]  # Trainer would gather the state as a prediction
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
