"""The Compressive Transformer against values of an independent implementation.

Legend: B rows, N tokens, M keys, H heads, E head width, D model width, R offsets, (O, I, K) of a convolution.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.memories.compressive import Compressive
from cached_transformers.positions import Positions


class TablePositions(Positions):
    """[(q + u) . k + q . e_r + b_r] / sqrt(E), e and b trained for each r = key - query, in row r + 64 of a table."""

    def __init__(self, code_RHE: Tensor, bias_RH: Tensor, u_HE: Tensor) -> None:
        super().__init__()
        self.code_RHE, self.bias_RH, self.u_HE = code_RHE, bias_RH, u_HE

    def query(self, q_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        return q_BHNE + self.u_HE[:, None]

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        offset_BNM = k_positions_BMP[:, None, :, 0] - q_positions_BNP[:, :, None, 0] + 64
        place = torch.einsum("bhne,bnmhe->bhnm", q_BHNE, self.code_RHE[offset_BNM])
        return (place + self.bias_RH[offset_BNM].permute(0, 3, 1, 2)) / math.sqrt(q_BHNE.shape[-1])


@pytest.mark.device
def test_golden_values_of_an_independent_implementation(shared: Path) -> None:
    """Two pre-norm layers over five segments: outputs, memories, the reconstruction loss and its gradients."""
    golden = {k: v for k, v in np.load(shared / "golden/memories/compressive_labml.npz", allow_pickle=False).items()}
    weights = {k.removeprefix("param/"): torch.tensor(v) for k, v in golden.items() if k.startswith("param/")}

    def conv(weight_OIK: Tensor) -> Tensor:
        return weight_OIK.mT.flatten(1)

    def make_block(index: int) -> Block:
        own = {k.removeprefix(f"layers.{index}."): v for k, v in weights.items() if k.startswith(f"layers.{index}.")}
        memory = Compressive(16, 2, length=8, compressed=6, rate=4, error="mean_square", relative=False)
        places = TablePositions(
            own["self_attn.key_pos_embeddings"], own["self_attn.key_pos_bias"], own["self_attn.query_pos_bias"]
        )
        norms = [nn.LayerNorm(16), nn.LayerNorm(16)]
        attention = SelfAttention(16, 2, memory=memory, positions=places, norm=norms[0], causal=True)
        block = Block(attention, FeedForward(16, 32, norm=norms[1], activation="relu"))
        zero = torch.zeros(32, dtype=torch.float64)
        values = {
            norms[0].weight: own["norm_self_attn.weight"],
            norms[0].bias: own["norm_self_attn.bias"],
            norms[1].weight: own["norm_ff.weight"],
            norms[1].bias: own["norm_ff.bias"],
            attention.qkv.weight: torch.cat([own[f"self_attn.{n}.linear.weight"] for n in ("query", "key", "value")]),
            attention.qkv.bias: torch.cat([zero, own["self_attn.value.linear.bias"]]),
            attention.output.weight: own["self_attn.output.weight"],
            attention.output.bias: own["self_attn.output.bias"],
            block.feed_forward.enter.weight: own["feed_forward.layer1.weight"],
            block.feed_forward.enter.bias: own["feed_forward.layer1.bias"],
            block.feed_forward.leave.weight: own["feed_forward.layer2.weight"],
            block.feed_forward.leave.bias: own["feed_forward.layer2.bias"],
            memory.function.linear.weight: conv(own["compress.conv.weight"]),
            memory.function.linear.bias: own["compress.conv.bias"],
        }
        for parameter, value in values.items():
            parameter.data = value.clone()
        return block

    stack = Stack(make_block, 2, width=16)
    stack.norm.weight.data, stack.norm.bias.data = weights["norm.weight"], weights["norm.bias"]
    state = stack.init_state(2, torch.zeros(1, dtype=torch.float64))

    def close(got: Tensor, name: str) -> None:
        torch.testing.assert_close(got, torch.tensor(golden[name]), rtol=0, atol=1e-12)

    for index, x_NBD in enumerate(torch.tensor(golden["x"])):
        out = stack(x_NBD.transpose(0, 1), state)
        close(out.outputs.detach().transpose(0, 1), f"seg{index}/out")
        for layer, (compressed, recent) in enumerate(out.state.layers):
            held = recent.hidden_BMD[:, recent.valid_BM[0]].transpose(0, 1)
            torch.testing.assert_close(held, torch.tensor(golden[f"seg{index}/mem"])[layer], rtol=0, atol=1e-12)
            if index:
                slots = compressed.hidden_BMD[:, compressed.valid_BM[0]].transpose(0, 1)
                want = torch.tensor(golden[f"seg{index}/cmem"])[layer]
                torch.testing.assert_close(slots, want, rtol=0, atol=1e-12)
        state = out.state
        if index == 0:
            assert out.auxiliary_loss == 0
            continue
        close(out.auxiliary_loss.detach(), f"seg{index}/ar_loss")
        stack.zero_grad()
        out.auxiliary_loss.backward()
        for name, parameter in stack.named_parameters():
            assert ".function." in name or parameter.grad is None or parameter.grad.abs().max() == 0, name
        for layer, memory in enumerate(stack.layer_memories()):
            want = torch.tensor(golden[f"seg{index}/ar_grad/layer{layer}.conv.weight"])
            torch.testing.assert_close(memory.function.linear.weight.grad, conv(want), rtol=0, atol=1e-12)
            close(memory.function.linear.bias.grad, f"seg{index}/ar_grad/layer{layer}.conv.bias")
