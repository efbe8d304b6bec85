"""Drill: padding on either side, whatever it holds, changes no token and no state.

A case `models/seed/number` is a model of this package, `hosts/seed/number` a decoder of transformers. Each draws a
memory, an attention, places of padding and its values; its rows are read alone, and padded in a batch.

Legend: B rows, N columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers import state as states
from cached_transformers.registry import ATTENTIONS, MEMORIES

from .frame import Failure

ROWS, LONGEST, CALLS, TRIES = 3, 6, 3, 200
"""Rows of a batch, tokens of a row in a call, calls of a case, draws until one can be built."""
HELD = ("ids", "ids", "NaN", "NaN in every layer")
"""Values of padding."""
BOTH = ("gemma2", "gemma3_text", "qwen2", "ministral", "cohere2", "olmo3")
WINDOWS = (*BOTH, "mistral", "phi3", "starcoder2")
"""Decoders with windows, in one layer of two or in all. GPT-Neo's own KV cache leaves its window out."""
OTHERS = ("llama", "gpt2", "bloom", "falcon_alibi", "gpt_neox")
SPANNING: tuple[dict[str, Any], ...] = (
    *({"name": "rmt", "length": 3, "mask": mask} for mask in ("causal", "causal", "full")),
    *({"name": "memory_transformer", "length": 3, "mask": mask} for mask in ("causal", "full")),
    *({"name": "armt", "length": 3, "key_width": 16, "mask": mask} for mask in ("causal", "full")),
    {"name": "rmt", "length": 3, "mask": "causal", "cache": 4, "read_cache": True},
    {"name": "rmt", "length": 2, "cache": 4},
    {"name": "memory_transformer", "length": 2, "cache": 3},
    {"name": "memformer", "length": 3},
)
LAYERED: tuple[dict[str, Any], ...] = (
    *({"name": name, "length": 4} for name in ("transformer_xl", "grc_stream", "tova")),
    {"name": "memorizing", "length": 8, "k": 3},
    {"name": "compressive", "length": 4, "compressed": 3, "rate": 2},
    {"name": "infini"},
    {"name": "titans", "chunk": 4},
    {"name": "ttt", "mini_batch": 3},
    {"name": "h2o", "length": 3, "heavy": 2},
)


def cases(count: int, seed: int) -> Iterator[str]:
    """Models of this package and of transformers by turns."""
    return (f"{('models', 'hosts')[number % 2]}/{seed}/{number}" for number in range(count))


def prepare(shared: Path) -> None:
    """Import what cases use."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    torch.set_num_threads(1)
    import contract.test_pairs  # noqa: F401

    for name in (*WINDOWS, *OTHERS):
        decoder(name, 4)


def attempt(case: str, folder: Path) -> None:
    """Draw combinations until one can be built; each refusal must name what it refuses."""
    random = Random(case)
    draw = _draw_model if case.startswith("models") else _draw_host
    for _ in range(TRIES):
        torch.manual_seed(random.randrange(2**30))
        said, names, build = draw(random)
        try:
            reader = build()
        except ValueError as error:
            if not any(name in str(error) for name in names):
                raise Failure(f"{said}: expected a refusal that names one of {names}, found: {error}") from error
            continue
        try:
            compare(reader, random, random.choice(HELD))
        except Exception as error:
            raise Failure(f"{said}: {type(error).__name__}: {error}") from error
        return
    raise Failure(f"nothing could be built in {TRIES} draws")


class Layout:
    """Columns of a batch in one call: the tokens of each row, and where they are."""

    def __init__(self, random: Random, vocabulary: int, least: int, among: bool) -> None:
        lengths = [random.randint(least, LONGEST) for _ in range(ROWS)]
        columns = max([1, *lengths]) + random.choice([0, 1, 2, 4])
        self.padding_BN = torch.ones(ROWS, columns, dtype=torch.bool)
        self.rows: list[Tensor] = []
        for row, n in enumerate(lengths):
            begin = random.choice([0, columns - n, random.randint(0, columns - n)])
            scattered = among and random.random() < 0.3
            places = random.sample(range(columns), n) if scattered else list(range(begin, begin + n))
            self.padding_BN[row, places] = False
            # Equal tokens may be told apart by a rounding where an attention chooses among them.
            self.rows.append(torch.tensor([random.sample(range(3, vocabulary), n)], dtype=torch.long))

    def batch(self, value: int | None, vocabulary: int) -> Tensor:
        """(B, N) ids: of the tokens, and one value or any at padding."""
        ids_BN = torch.randint(3, vocabulary, self.padding_BN.shape) if value is None else self.padding_BN * value
        ids_BN[~self.padding_BN] = torch.cat(self.rows, 1)[0]
        return ids_BN


class Model:
    """A model of this package, whose last call holds two documents in a row if it `packs`; token 0 embeds to NaN."""

    least, among, close = 0, True, 1e-7

    def __init__(self, model: Any, kind: str, vocabulary: int, packs: bool = False) -> None:
        self.model, self.kind, self.vocabulary = model.double().eval(), kind, vocabulary
        self.packs, self.poisoned = packs, False
        with torch.no_grad():
            model.embedding.weight[0] = torch.nan
        for block in model.stack.blocks:
            block.register_forward_pre_hook(self._poison, with_kwargs=True)

    def _poison(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        padding_BN = options.get("padding_BN")
        if not self.poisoned or padding_BN is None:
            return None
        return (args[0].masked_fill(padding_BN[..., None], torch.nan), *args[1:]), options

    def state(self, rows: int) -> Any:
        return self.model.init_state(rows)

    def together(self, ids_BN: Tensor, padding_BN: Tensor, state: Any, last: bool) -> tuple[Tensor, Any]:
        """Outputs and state of padded rows."""
        more: dict[str, Any] = {"padding": padding_BN}
        if self.packs and last:
            rank_BN, count_B1 = (~padding_BN).cumsum(1) - 1, (~padding_BN).sum(1, keepdim=True)
            more = {"documents": (rank_BN >= count_B1 // 2).long().masked_fill(padding_BN, -1)}
        out = self.model(ids_BN, state, **more)
        return out.outputs[..., 1:], out.state

    def alone(self, ids_1N: Tensor, state: Any, last: bool) -> tuple[Tensor, Any]:
        """Outputs and state of one row without padding."""
        half = ids_1N.shape[1] // 2
        if not (self.packs and last and half):
            out = self.model(ids_1N, state)
            return out.outputs[..., 1:], out.state
        first, second = self.model(ids_1N[:, :half], state), self.model(ids_1N[:, half:], self.state(1))
        return torch.cat([first.outputs, second.outputs], 1)[..., 1:], second.state


class Host:
    """A decoder of transformers, which reads segments of a row in a call, and goes on with its KV cache.

    In float32: written out attention of transformers gives NaN beside padding in float64.
    """

    least, among, kind, poisoned = 1, False, "decoder", False

    def __init__(self, model: Any, cached: bool, close: float) -> None:
        self.model, self.vocabulary, self.cached, self.close = model.eval(), model.config.vocab_size, cached, close

    def state(self, rows: int) -> Any:
        return self.model.init_memory_state(rows)

    def together(self, ids_BN: Tensor, padding_BN: Tensor, state: Any, last: bool) -> tuple[Tensor, Any]:
        """Outputs and state of padded rows, and of two more tokens of each."""
        goes_on = self.cached and last
        out = self._call(ids_BN, padding_BN, memory_state=state, use_cache=goes_on)
        logits = [out.logits]
        for token in (3, 4) if goes_on else ():
            padding_BN = torch.cat([padding_BN, padding_BN.new_zeros(len(ids_BN), 1)], 1)
            out = self._call(torch.full((len(ids_BN), 1), token), padding_BN, past_key_values=out.past_key_values)
            logits.append(out.logits)
        return torch.cat(logits, 1), out.past_key_values.memory_state if goes_on else out.memory_state

    def alone(self, ids_1N: Tensor, state: Any, last: bool) -> tuple[Tensor, Any]:
        """Outputs and state of one row without padding."""
        return self.together(ids_1N, torch.zeros_like(ids_1N, dtype=torch.bool), state, last)

    def _call(self, ids_BN: Tensor, padding_BN: Tensor, **given: Any) -> Any:
        """The model's output; token 0 embeds to NaN."""
        x_BND = self.model.get_input_embeddings()(ids_BN).masked_fill((ids_BN == 0)[..., None], torch.nan)
        mask = {"attention_mask": (~padding_BN).long()} if bool(padding_BN.any()) else {}
        return self.model(inputs_embeds=x_BND, **mask, **given)


def compare(reader: Any, random: Random, held: str) -> None:
    """Read rows alone, and padded in a batch, call after call; outputs, states and gradients must be the same."""
    state, alone = reader.state(ROWS), [reader.state(1) for _ in range(ROWS)]
    reader.poisoned = held == HELD[-1]
    sums: list[Any] = [0.0, 0.0]
    with torch.set_grad_enabled(not reader.poisoned):
        for call in range(CALLS):
            last, layout = call == CALLS - 1, Layout(random, reader.vocabulary, reader.least, reader.among)
            ids_BN = layout.batch(None if held == "ids" else 0, reader.vocabulary)
            found, state = reader.together(ids_BN, layout.padding_BN, state, last)
            for row, tokens in enumerate(layout.rows):
                where = f"call {call}, row {row} of {(~layout.padding_BN).int().tolist()}, padding of {held}"
                if tokens.shape[1]:
                    want, alone[row] = reader.alone(tokens, alone[row], last)
                    got = found[row : row + 1]
                    if reader.kind != "sequence_classifier":
                        more = torch.ones(found.shape[1] - ids_BN.shape[1], dtype=torch.bool)
                        got = got[:, torch.cat([~layout.padding_BN[row], more])]
                    _same(f"outputs of {where}", got, want, reader.close)
                    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
                    sums = [total + (t * weights).sum() for total, t in zip(sums, (got, want), strict=True)]
                pairs = zip(states.named_tensors(state), states.named_tensors(alone[row]), strict=True)
                for (name, t), (_, single) in pairs:
                    _same(f"state {name} of {where}", t[row : row + 1], single, reader.close)
    if reader.poisoned or not isinstance(sums[0], Tensor):
        return
    parameters = dict(reader.model.named_parameters())
    found_and_wanted = [torch.autograd.grad(total, list(parameters.values()), allow_unused=True) for total in sums]
    for (name, parameter), *pair in zip(parameters.items(), *found_and_wanted, strict=True):
        got, want = (torch.zeros_like(parameter) if t is None else t for t in pair)
        _same(f"gradient of {name}, padding of {held}", got, want, 10 * reader.close)


def _same(what: str, found: Tensor, want: Tensor, close: float) -> None:
    apart = (found.detach() - want.detach()).abs().max() if found.numel() else torch.zeros(())
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    if not apart <= close * max(1.0, size):
        raise Failure(f"{what}: expected those of the row alone, of {size:.2g}, found {float(apart):.2g} away")


def _draw_model(random: Random) -> tuple[str, list[str], Any]:
    from contract.contract_cases import ATTENTION_ROWS, CONTRACTS, VOCABULARY, Case
    from contract.test_pairs import models_of

    label = random.choice([*CONTRACTS, "rmt/causal", "armt", "memformer"])
    mixing = [name for name in (*ATTENTIONS.names(), *ATTENTION_ROWS) if name != "image_transformer"]  # cells of a map
    attention = "softmax" if random.random() < 0.3 else random.choice(mixing)
    kinds = [kind for kind in models_of(label) if kind in ("language_model", "sequence_classifier")]
    kind = random.choice(kinds or ["language_model"])
    options = {"short_convolution": 3} if random.random() < 0.25 else {}
    options |= {"tied": False} if kind == "language_model" else {"max_length": 12}
    case = Case(label, attention, kind)

    def build() -> Model:
        return Model(case.build(**options), kind, VOCABULARY, kind == "language_model" and random.random() < 0.5)

    names = [MEMORIES.entry(case.name).factory.__name__] if case.name in MEMORIES else []
    names += [ATTENTIONS.entry(attention.partition("/")[0]).factory.__name__, attention, "this model"]
    return f"{label}, {attention}, {kind}, {options}", names, build


def decoder(name: str, window: int) -> Any:
    """A decoder of transformers, none of whose weights is near zero."""
    from integrations import families

    sizes = {**families.GROUPED, "sliding_window": window}
    if name in BOTH:
        kinds = ["sliding_attention", "full_attention"]
        sizes |= {**families.EIGHT, "layer_types": kinds, "use_sliding_window": True}
    known = {family.name: family for family in families.DECODERS}
    model = (known[name] if name in OTHERS else families.decoder(name, "", **sizes)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def host(name: str, window: int, memory: dict[str, Any], cached: bool, length: int | None = None, **kind: str) -> Host:
    """A decoder with a memory; `kind` is of its attention."""
    model = decoder(name, window)
    if kind and name != "gemma2":  # which has only the one that is written out
        model.set_attn_implementation(**kind)
    torch.manual_seed(1)
    add_memory(model, memory, segment_length=length)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "memory" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return Host(model, cached, 1e-3 if memory["name"] == "armt" else 2e-5)  # armt divides by small sums


def _draw_host(random: Random) -> tuple[str, list[str], Any]:
    memory = random.choice([*SPANNING, *SPANNING, *LAYERED])
    drawn = random.choice([*WINDOWS, *WINDOWS, *OTHERS]), random.choice([2, 3, 5]), memory, random.random() < 0.4
    more = {"length": random.choice([2, 4, LONGEST, None]), "attn_implementation": random.choice(["eager", "sdpa"])}
    return f"{drawn}, {more}", [memory["name"]], lambda: host(*drawn, **more)


SUMMARY = (
    "models of this package and of transformers, with windows too, memory, attention and layout of padding at random: "
    "outputs at tokens, states and gradients are those of each row alone, whatever padding holds, or the pair is "
    "refused by name"
)
COUNT, SAMPLE = 300, 8
