"""Memories with a state in GPT-2 and Llama: against slow twins, and what segments, rows and padding ask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from integrations import family_checks as checks
from integrations import transformers_hosts as T
from integrations.transformers_hosts import Architecture, architectures, awaken, differences, stream, streams, words
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import SegmentLoop, add_memory, create_model
from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.memories.parts.interpolation import interpolate
from cached_transformers.state import detach, map_state


def heads(t_BND: Tensor, count: int) -> Tensor:
    return t_BND.unflatten(-1, (count, -1)).transpose(1, 2)


def one_layer(host: Architecture) -> Any:
    return host.build(num_hidden_layers=1)


class Layer:
    """The only layer of a host, step by step, with a place where something can be mixed into its heads."""

    def __init__(self, host: Architecture, model: Any) -> None:
        self.gpt, self.model = host is T.GPT2, model
        self.body = model.transformer if self.gpt else model.model
        self.block = self.body.h[0] if self.gpt else self.body.layers[0]
        self.attention = self.block.attn if self.gpt else self.block.self_attn
        self.heads = 2 if self.gpt else 4

    def inputs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream, and the attention's input."""
        places = torch.arange(ids.shape[1])
        h = self.body.wte(ids) + self.body.wpe(places) if self.gpt else self.body.embed_tokens(ids)
        return h, (self.block.ln_1 if self.gpt else self.block.input_layernorm)(h)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Without positions, keys and values for every head."""
        if self.gpt:
            q, k, v = self.attention.c_attn(x).chunk(3, -1)
            return heads(q, 2), heads(k, 2), heads(v, 2)
        q = heads(self.attention.q_proj(x), 4)
        k, v = (heads(p(x), 2).repeat_interleave(2, 1) for p in (self.attention.k_proj, self.attention.v_proj))
        return q, k, v

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention (B, H, N, E), with rotary positions where the host has them."""
        q, k, v = self.qkv(x)
        if not self.gpt:
            cos, sin = self.body.rotary_emb(x, torch.arange(x.shape[1])[None])

            def turn(t: Tensor) -> Tensor:
                a, b = t.chunk(2, -1)
                return t * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

            q, k = turn(q), turn(k)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -torch.inf).softmax(-1) @ v

    def rest(self, h: Tensor, y: Tensor) -> Tensor:
        """From the merged heads to the logits."""
        merged = y.transpose(1, 2).flatten(2)
        if self.gpt:
            weight = self.attention.c_proj
            h = h + merged @ weight.weight + weight.bias
            h = h + self.block.mlp(self.block.ln_2(h))
            return self.model.lm_head(self.body.ln_f(h))
        h = h + merged @ self.attention.o_proj.weight.T
        h = h + self.block.mlp(self.block.post_attention_layernorm(h))
        return self.model.lm_head(self.body.norm(h))


@architectures(T.DECODERS)
def test_grc_stream_is_the_gated_update_by_hand(host: Architecture) -> None:
    model = awaken(add_memory(one_layer(host), "grc_stream", length=4, segment_length=T.SEGMENT))
    layer, slots = Layer(host, one_layer(host)), 4
    memory = Layer(host, model).attention.memory
    gates, branch = memory.gates, memory.branch
    ids = words(2, 3 * T.SEGMENT)
    found = model(ids).logits
    cache, source, expected, c = None, None, [], 8
    for piece in ids.split(T.SEGMENT, 1):
        h, x = layer.inputs(piece)
        y = layer.attend(x)
        if source is not None:  # the update by the segment before is made now
            old = torch.zeros(2, slots, c) if cache is None else cache
            w_u, w_r, w_c = gates.from_tokens.weight.chunk(3)
            b_u, b_r, b_c = gates.from_tokens.bias.chunk(3)
            v_u, v_r, v_c = gates.from_cache.weight.chunk(3)
            u = torch.sigmoid(source @ w_u.T + b_u + old @ v_u.T)
            r = torch.sigmoid(source @ w_r.T + b_r + old @ v_r.T)
            new = F.layer_norm(
                F.gelu(source @ w_c.T + b_c + (r * old) @ v_c.T), (c,), gates.norm.weight, gates.norm.bias
            )
            cache = (1 - u) * old + u * new
            q = heads(branch.query(x[..., :c]), layer.heads)
            k, v = (heads(t, layer.heads) for t in branch.key_value(cache).chunk(2, -1))
            o = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
            share = torch.sigmoid(branch.gate_H)[:, None, None]
            y = share * F.pad(o, (0, y.shape[-1] - o.shape[-1])) + (1 - share) * y
        source = interpolate(x[..., :c], slots, "nearest", None)
        expected.append(layer.rest(h, y))
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)


@architectures(T.DECODERS)
def test_memorizing_is_a_softmax_over_all_earlier_keys(host: Architecture) -> None:
    model = awaken(add_memory(one_layer(host), "memorizing", length=20, k=20, segment_length=T.SEGMENT))
    layer = Layer(host, one_layer(host))
    memory = Layer(host, model).attention.memory
    ids = words(2, 3 * T.SEGMENT)
    found, expected = model(ids).logits, []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for piece in ids.split(T.SEGMENT, 1):
        h, x = layer.inputs(piece)
        y = layer.attend(x)
        q, k, v = layer.qkv(x)
        if keys:
            logits = F.normalize(q, dim=-1) @ torch.cat(keys, 2).mT * memory.scale_H.abs()[:, None, None]
            gate = torch.sigmoid(memory.gate_H)[:, None, None]
            y = gate * (logits.softmax(-1) @ torch.cat(values, 2)) + (1 - gate) * y
        keys.append(F.normalize(k, dim=-1))
        values.append(v)
        expected.append(layer.rest(h, y))
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)


@architectures(T.DECODERS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rmt_is_the_host_between_memory_tokens(host: Architecture, mask: str, implementation: str) -> None:
    plain = host.build()
    plain.set_attn_implementation(implementation)
    model = host.build()
    model.set_attn_implementation(implementation)
    awaken(add_memory(model, "rmt", length=3, mask=mask, segment_length=T.SEGMENT))
    ids = words(2, 2 * T.SEGMENT + 2)
    found = model(ids)
    m, expected, hidden = 3, [], []
    carried = model.base_model.memory.initial_MD.expand(2, -1, -1)
    for piece in ids.split(T.SEGMENT, 1):
        x = torch.cat([carried, plain.get_input_embeddings()(piece), carried], 1)
        total = x.shape[1]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        if mask == "full":
            sees[:m, :m] = sees[-m:] = True
        added = torch.zeros(2, 1, total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
        out = plain.base_model(inputs_embeds=x, attention_mask=added, output_hidden_states=True)
        carried = out.last_hidden_state[:, -m:]
        expected.append(plain.lm_head(out.last_hidden_state[:, m:-m]))
        hidden.append(out.hidden_states[1][:, m:-m])
    torch.testing.assert_close(found.logits, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.memory_state.model.tokens_BMD, carried, rtol=1e-4, atol=1e-5)
    found_hidden = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found_hidden[1], torch.cat(hidden, 1), rtol=1e-4, atol=1e-5)


@architectures(T.DECODERS)
@streams
def test_the_gradient_crosses_the_segments(host: Architecture, memory: str) -> None:
    model, ids = awaken(stream(host, memory)).train(), words(2, 3 * T.SEGMENT)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[:, 2 * T.SEGMENT :].square().mean().backward()
    assert embeds.grad is not None
    crossed = embeds.grad[:, : T.SEGMENT].abs().max() > 1e-9
    assert crossed == (memory != "memorizing")  # whose store stops it
    grads = []
    for cut in (False, True):
        model.zero_grad()
        state, loss = None, torch.zeros(())
        for piece in ids.split(T.SEGMENT, 1):
            out = model(piece, labels=piece, memory_state=state)
            state = detach(out.memory_state) if cut else out.memory_state
            loss = loss + out.loss
        loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    if memory == "grc_stream":  # the gates learn from the next segment even so: the update is made there
        assert all(grads[1][n].abs().max() > 0 for n in grads[1] if "memory.gates" in n)
    assert (memory == "memorizing") == all(torch.allclose(g, grads[1][n], atol=1e-8) for n, g in grads[0].items())


@architectures(T.DECODERS)
def test_reentrant_checkpointing_is_refused(host: Architecture) -> None:
    model = stream(host, "grc_stream").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(words(2, T.SEGMENT))


@pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])
def test_a_segment_loop_trains_it(memory: str) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = create_model("transformers", vocabulary=30, architecture="gpt2", memory=T.STREAMS[memory], **sizes)
    model.set_activation_checkpointing(memory != "memorizing")
    loop = SegmentLoop(model, T.SEGMENT, bptt=2)
    optimizer = torch.optim.AdamW(loop.parameters(), 3e-3)
    ids, state, losses = words(3, 4 * T.SEGMENT + 1), None, []
    padding = torch.zeros(3, 4 * T.SEGMENT, dtype=torch.bool)
    padding[2, -3:] = True
    for step in range(4):
        rows = torch.tensor([True, False, step == 2])
        loss, state = loop(ids[:, :-1], ids[:, 1:], state, rows if step else None, padding)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert differences(map_state(lambda t: t[:1], state), map_state(lambda t: t[1:2], state)) > 1e-3


def test_noise_on_weights_trains_every_parameter() -> None:
    """In five steps: the preset's noise leaves no gradient for some in one."""
    model = add_memory(T.LLAMA.build(), checks.RECENT["armt/llama"], segment_length=T.SEGMENT)
    ids, losses = words(2, 3 * T.SEGMENT), []
    own = {name: p.detach().clone() for name, p in model.named_parameters() if "memory." in name}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0)
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert own and [name for name, p in model.named_parameters() if name in own and own[name].equal(p)] == []


WIDER = [
    {"name": "titans", "chunk": 4},
    {"name": "titans", "chunk": 4, "place": "context", "persistent": 2, "nets": 3},
    {"name": "ttt", "mini_batch": 3},
    {"name": "lact", "momentum": True},
    {"name": "infini"},
    {"name": "block_recurrent", "length": 2},
    {"name": "memory_caching", "slots": 2},
    {"name": "memory_caching", "slots": 2, "over": {"name": "titans", "layers": 2}, "read": "soup"},
    {"name": "memory_caching", "slots": 2, "over": "ttt"},
]


@pytest.mark.parametrize("head_dim", [8, 4])
@pytest.mark.parametrize("memory", WIDER, ids=str)
def test_heads_that_are_wider_or_narrower_together_than_the_layers_input(memory: dict[str, Any], head_dim: int) -> None:
    """As in Qwen3 and Gemma: 4 heads of 8, or of 4, for 24 channels."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    model, ids = T.LLAMA.build(**sizes), words(2, 3 * T.SEGMENT)
    before = model(ids[:, : T.SEGMENT]).logits
    add_memory(model, memory, segment_length=T.SEGMENT)
    outs = model(ids, labels=ids)
    outs.loss.backward()
    own = {name: p for name, p in model.named_parameters() if ".memory." in name}
    assert own and all(p.grad is not None and p.grad.isfinite().all() for p in own.values())
    state = model(ids[:, : T.SEGMENT]).memory_state
    later = model(ids[:, T.SEGMENT : 2 * T.SEGMENT], memory_state=state).logits
    torch.testing.assert_close(later, outs.logits[:, T.SEGMENT : 2 * T.SEGMENT], rtol=0, atol=1e-4)
    for layer in model.modules():
        if isinstance(getattr(layer, "memory", None), LayerMemory):
            layer.memory.close_gate()
    torch.testing.assert_close(model(ids[:, : T.SEGMENT]).logits, before, rtol=0, atol=1e-5)
