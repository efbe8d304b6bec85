"""What is read in front of the blocks of a decoder of transformers: ARMT in GPT-2 and Llama, against a twin of loops;
what padding, dtypes, adapters and memories of others ask.

Legend: B rows, N tokens, M memory tokens, D width, K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from common import refuses
from integrations import transformers_hosts as T
from integrations.hosts import library
from integrations.transformers_hosts import Architecture, architectures, awaken, by_hand, words
from memories.test_armt import slow_read, slow_write
from torch import Tensor, nn

from cached_transformers import add_memory, remove_memory
from cached_transformers.interfaces.memory import Entry, ModelMemory, Tokens
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

M, FEATURES = 3, 2 * 3 * 6
ARMT: dict[str, Any] = {"name": "armt", "length": M, "key_width": 6}


def armt(host: Architecture, wild: bool = True, **options: Any) -> Any:
    torch.manual_seed(1)
    model = add_memory(host.build(), {**ARMT, **options}, segment_length=T.SEGMENT)
    return awaken(model) if wild else model


def blocks_of(model: Any) -> Any:
    return (
        model.transformer.h
        if isinstance(model.base_model.config, library("transformers").GPT2Config)
        else model.model.layers
    )


class Loops:
    """A host whose blocks are given, row by row, what a loop over tokens reads; a loop stores its memory tokens."""

    def __init__(self, plain: Any, memory: Any) -> None:
        self.plain, self.memory, self.blocks = plain, memory, blocks_of(plain)
        self.made: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda _, args, index=index: (self.read(index, args[0]), *args[1:]))
            block.register_forward_hook(lambda _, __, out: self.made.append(out[0] if isinstance(out, tuple) else out))

    def read(self, index: int, x_1ND: Tensor) -> Tensor:
        query = self.memory.slot_attentions[str(index)].query.weight
        return torch.stack([slow_read(x_D, query, self.A[index], self.z[index]) for x_D in x_1ND[0]])[None]

    def __call__(self, ids_N: Tensor) -> Tensor:
        """Logits of a row."""
        width, depth = self.memory.width, len(self.blocks)
        self.A, self.z, parts = (
            [torch.zeros(width, FEATURES).double()] * depth,
            [torch.zeros(FEATURES).double()] * depth,
            [],
        )
        for piece in ids_N.split(T.SEGMENT):
            self.made = []
            x_ND = torch.cat([self.plain.get_input_embeddings()(piece), self.memory.initial_MD])
            y_1ND = self.plain.base_model(inputs_embeds=x_ND[None], use_cache=False).last_hidden_state
            parts.append(self.plain.lm_head(y_1ND[0, : len(piece)]))
            for index, made_1ND in enumerate(self.made):
                m_MD = self.memory.norm(made_1ND[0, len(piece) :])
                self.A[index], self.z[index] = slow_write(m_MD, self.memory, index, self.A[index], self.z[index])
        return torch.cat(parts)


@architectures(T.DECODERS)
def test_values_and_gradients_are_those_of_loops(host: Architecture) -> None:
    model, plain, ids = armt(host).double(), host.build().double(), words(2, 3 * T.SEGMENT + 2)
    twin, found = Loops(plain, model.base_model.memory), model(ids)
    assert isinstance(model.base_model.memory.norm, nn.LayerNorm), "no norm of the host's has seen what is stored"
    expected = torch.stack([twin(row) for row in ids])
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)
    state = found.memory_state.model
    torch.testing.assert_close(state.values_BLKD[1], torch.stack([A.mT for A in twin.A]), rtol=0, atol=1e-4)
    torch.testing.assert_close(state.mass_BLK[1], torch.stack(twin.z), rtol=0, atol=1e-4)
    alone = torch.cat(
        [plain.base_model(piece).last_hidden_state for piece in ids[:, T.SEGMENT :].split(T.SEGMENT, 1)], 1
    )
    assert (plain.lm_head(alone) - found.logits[:, T.SEGMENT :]).abs().max() > 0.01, "what is read shows"
    weights, grads = torch.linspace(-1, 1, expected.numel()).view_as(expected), []
    for logits, of in ((found.logits, model), (expected, plain)):
        model.zero_grad()
        (logits * weights).sum().backward()
        ours = {name: p.grad.clone() for name, p in model.named_parameters() if "memory." in name}
        grads.append(ours | {name: p.grad for name, p in of.named_parameters() if "memory." not in name})
    for name, gradient in grads[1].items():
        scale = gradient.abs().max() + 1e-6
        torch.testing.assert_close(grads[0][name] / scale, gradient / scale, rtol=0, atol=1e-3, msg=name)


@architectures(T.DECODERS)
@torch.no_grad()
def test_with_values_of_zero_it_is_the_host(host: Architecture) -> None:
    """As it is drawn: no token sees the memory tokens behind it, and nothing is read."""
    model, plain, ids = armt(host, wild=False), host.build(), words(2, 3 * T.SEGMENT)
    expected = torch.cat([plain(piece).logits for piece in ids.split(T.SEGMENT, 1)], 1)
    out = model(ids)
    assert torch.equal(out.logits, expected) and (out.memory_state.model.mass_BLK > 0).any()
    assert torch.equal(remove_memory(model)(ids).logits, plain(ids).logits)


@architectures(T.DECODERS)
def test_associations_of_a_host_in_half_the_digits_are_float32(host: Architecture) -> None:
    model, ids = armt(host), words(2, 3 * T.SEGMENT)
    expected = model(ids).logits
    out = model.bfloat16()(ids, labels=ids)
    assert out.logits.dtype == torch.bfloat16 and out.memory_state.model.values_BLKD.dtype == torch.float32
    assert out.memory_state.model.mass_BLK.dtype == torch.float32
    assert (out.logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.base_model.memory.parameters())


def lora(model: Any, targets: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets)).train()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_leave_a_part_of_it_untrained_are_refused() -> None:
    ids = words(2, 3 * T.SEGMENT)
    refuses(r"memory ARMT was just added", lora(armt(T.LLAMA, wild=False), ["q_proj"]), ids)
    refuses(r"slot_attentions\.0\.query\.lora_A.*values\.0", lora(armt(T.LLAMA, wild=False), ["q_proj", "query"]), ids)
    alone = armt(T.LLAMA, wild=False).train()
    for name, parameter in alone.named_parameters():
        parameter.requires_grad_("memory.values" not in name)
    refuses(r"initial_MD.*values\.0", alone, ids)
    lora(armt(T.LLAMA, wild=False), "all-linear")(ids)  # adapters of all of them train it


class Adds(nn.Module):
    """Adds what was carried."""

    in_front = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_D = nn.Parameter(torch.ones(width))

    def forward(self, x_BND: Tensor, carried_BD: Tensor) -> Tensor:
        return x_BND + self.scale_D * carried_BD[:, None]


class Behind(Adds):
    """Made for the place behind a layer's attention."""

    in_front = False


class Carries(ModelMemory):
    """The mean output of a segment, added in front of the second block of the next one."""

    needs = frozenset({"state", "slots_in_front"})
    reader: type[nn.Module] | None = Adds

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width

    def init_state(self, batch_size: int, like: Tensor) -> State:
        return (like.new_zeros(batch_size, self.width),)

    def slot_attention(self, index: int) -> nn.Module | None:
        return self.reader(self.width) if index == 1 and self.reader is not None else None

    def enter(self, opened: Any, tokens: Tokens) -> Entry:
        return Entry(tokens, slots=opened)

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Any]) -> tuple[Tensor, State, None]:
        return x_BND, (x_BND.mean(1),), None


class CarriesBehind(Carries):
    reader = Behind


class CarriesNowhere(Carries):
    reader = None


class Silent(Carries):
    """Does not say what it needs."""

    needs = frozenset({"state"})


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    for kind in (Carries, CarriesBehind, CarriesNowhere, Silent):
        MEMORIES.register(kind.__name__.lower())(kind)


@architectures(T.DECODERS)
@torch.no_grad()
def test_a_memory_of_others_is_read_in_front_of_the_block_that_it_names(host: Architecture, others: None) -> None:
    model, plain, ids = (
        add_memory(host.build(), "carries", segment_length=T.SEGMENT),
        host.build(),
        words(2, 3 * T.SEGMENT),
    )
    carried: list[Tensor] = [torch.zeros(2, 16)]
    blocks_of(plain)[1].register_forward_pre_hook(lambda _, args: (args[0] + carried[-1][:, None], *args[1:]))
    expected = []
    for piece in ids.split(T.SEGMENT, 1):
        hidden = plain.base_model(piece).last_hidden_state
        expected.append(plain.lm_head(hidden))
        carried.append(hidden.mean(1))
    torch.testing.assert_close(model(ids).logits, torch.cat(expected, 1))
    torch.testing.assert_close(by_hand(model, ids)[0], torch.cat(expected, 1))


def test_what_is_no_reader_in_front_is_refused(others: None) -> None:
    for name, why in (
        ("carriesbehind", "of Behind, which does not say in_front=True"),
        ("carriesnowhere", "gives none"),
    ):
        model = T.LLAMA.build()
        refuses(rf"needs slots to be read before blocks, .*{why}", add_memory, model, name, segment_length=T.SEGMENT)
        assert not any("uninstall_memory" in vars(module) for module in model.modules())
    refuses("'slots_in_front'", add_memory(T.LLAMA.build(), "silent", segment_length=T.SEGMENT), words(2, 7))
    refuses(r"'memformer'.*docs/support.md", add_memory, T.LLAMA.build(), "memformer", segment_length=T.SEGMENT)
