"""Encoders of images with a memory that has a state: videos, one frame a call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import Family, patches, timm_family
from integrations.hosts import close_gates, library
from integrations.transformers_hosts import awaken, differences
from integrations.wrapped_checks import one_process
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import ReplayLoop, SegmentLoop, add_memory, create_model, remove_memory
from cached_transformers.models.segments import for_loops
from cached_transformers.state import last_use, map_state

TIMM: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
VIT = patches("ViT", "", "ForImageClassification")
DEIT = patches("DeiT", "", "ForImageClassificationWithTeacher")
DINO = patches("Dinov2", "", "ForImageClassification")
REGISTERS = patches("Dinov2WithRegisters", "", "ForImageClassification", num_register_tokens=2)
BEIT = patches("Beit", "", "ForImageClassification", use_relative_position_bias=True)
TIMM_VIT = timm_family("timm_vit", "", "vit_small_patch16_224", 16, **TIMM)
TIMM_NORMS = timm_family("timm_norms", "", "vit_small_patch16_224", 16, qk_norm=True, **TIMM)
TIMM_DEIT = timm_family("timm_deit", "", "deit_tiny_distilled_patch16_224", 16, **TIMM)
RMT, CACHE = {"name": "rmt", "length": 3}, {"name": "grc_stream", "length": 4}
NEAREST = {"name": "memorizing", "length": 40, "k": 4}
PAIRS = [
    *((family, memory) for family in (VIT, DEIT, DINO, REGISTERS) for memory in (RMT, CACHE)),
    *((family, memory) for family in (VIT, BEIT, TIMM_VIT, TIMM_NORMS) for memory in (NEAREST, CACHE)),
    (TIMM_DEIT, CACHE),
]
with_memories = pytest.mark.parametrize("family, memory", PAIRS, ids=[f"{f}-{m['name']}" for f, m in PAIRS])


def frames(count: int = 3, rows: int = 2, seed: int = 0) -> Tensor:
    """A video of each row, (B, T, 3, 16, 16)."""
    return torch.randn(rows, count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def made(family: Family, memory: Any) -> Any:
    model = family.build()
    torch.manual_seed(1)
    return awaken(add_memory(model, memory))


def answer(out: Any) -> tuple[Tensor, Any]:
    """Logits and state, of a model of transformers or of timm."""
    return (out.outputs, out.state) if hasattr(out, "outputs") else (out.logits, out.memory_state)


def watch(model: Any, video: Tensor) -> tuple[Tensor, Any]:
    """Logits of all frames, (B, T, V), and the state after the last one."""
    parts, state = [], model.init_memory_state(len(video))
    for frame in video.unbind(1):
        logits, state = answer(model(frame, memory_state=state))
        parts.append(logits)
    return torch.stack(parts, 1), state


@with_memories
def test_a_frame_is_seen_behind_those_before_it(family: Family, memory: Any) -> None:
    model, video, plain = made(family, memory), frames(), family.build()
    logits, _ = watch(model, video)
    assert (logits[:, -1:] - watch(model, video[:, -1:])[0]).abs().max() > 1e-4
    changed = torch.cat([video[:, :2], -video[:, 2:]], 1)
    assert torch.equal(watch(model, changed)[0][:, :2], logits[:, :2])
    assert (watch(model, changed.flip(1))[0][:, -1] - watch(model, video.flip(1))[0][:, -1]).abs().max() > 1e-7
    torch.testing.assert_close(watch(model, video[:1])[0], logits[:1])  # a row is the row alone
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(watch(again, video)[0], logits)
    last = plain(video[:, -1])
    last = last if isinstance(last, Tensor) else last.logits
    if memory is CACHE:
        close_gates(model)
        torch.testing.assert_close(watch(model, video)[0][:, -1], last)
    removed = remove_memory(model)
    out = removed(video[:, -1])
    assert torch.equal(out if isinstance(out, Tensor) else out.logits, last)
    assert not hasattr(removed, "init_memory_state") and list(removed.state_dict()) == list(plain.state_dict())


def test_memory_tokens_in_a_vit_are_those_of_the_paper() -> None:
    model, video = made(VIT, RMT).double(), frames().double()
    vit, memory = model.vit, model.vit.memory
    carried, parts = memory.initial_MD.expand(2, -1, -1), []
    for frame in video.unbind(1):
        x = torch.cat([carried, vit.embeddings(frame)], 1)
        for layer in vit.layers:
            x = layer(x)
        x = vit.layernorm(x)
        carried = x[:, :3]
        parts.append(model.classifier(x[:, 3]))
    logits, state = watch(model, video)
    torch.testing.assert_close(logits, torch.stack(parts, 1))
    torch.testing.assert_close(state.model.tokens_BMD, carried)
    weights = [memory.initial_MD, *vit.parameters()]
    pairs = [torch.autograd.grad(t.square().sum(), weights, allow_unused=True) for t in (logits, torch.stack(parts, 1))]
    for found, expected in zip(*pairs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
    body = remove_memory(made(VIT, RMT)).vit
    assert "forward" not in vars(body.embeddings)


def test_what_a_pooler_makes_has_no_memory_token_in_it() -> None:
    vit, dino = (patches(stem, "", "Model") for stem in ("ViT", "Dinov2"))
    for family in (vit, dino):
        model = made(family, RMT)
        out = model(frames()[:, 0])
        first = out.last_hidden_state[:, 0]
        expected = model.pooler(out.last_hidden_state) if family is vit else first
        assert out.last_hidden_state.shape[1] == 17 and torch.equal(out.pooler_output, expected)


@pytest.mark.parametrize("family, memory", [(VIT, RMT), (VIT, CACHE), (TIMM_VIT, CACHE)], ids=["rmt", "cache", "timm"])
def test_loops_read_videos(family: Family, memory: Any) -> None:
    video, classes = frames(5), torch.randint(0, 2, (2, 5))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    losses, states = [], []
    for kind in (SegmentLoop, ReplayLoop):
        model = made(family, memory).train()
        loss, state = kind(model, segment_length=2, bptt=3)(video, classes, padding=padding)
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if "memory." in name)
        losses.append(loss)
        states.append(state)
    logits, _ = watch(model, video)
    wanted = torch.cat([logits[0], logits[1, :3]])
    torch.testing.assert_close(losses[0], F.cross_entropy(wanted, torch.cat([classes[0], classes[1, :3]])))
    torch.testing.assert_close(*losses)
    assert differences(*states) < 1e-6
    short = watch(model, video[1:, :3])[1]  # of which the row without frames kept its state
    found = map_state(lambda t: t[1:], states[0])
    assert differences(found, short) < 1e-5
    refuses(r"inputs of shape \(2, 2\) are no videos", SegmentLoop(model, 2), classes, classes)


def test_a_row_without_a_frame_keeps_its_state_though_that_is_given_up() -> None:
    model = for_loops(made(TIMM_VIT, NEAREST)).eval()
    padding = torch.tensor([[False, False], [True, False]])
    with torch.no_grad():
        first = model(frames(2))
        expected = model(frames(2, seed=1), first.state, padding=padding)
        with last_use(first.state):
            found = model(frames(2, seed=1), first.state, padding=padding)
    assert torch.equal(found.outputs, expected.outputs) and differences(found.state, expected.state) == 0


@pytest.mark.parametrize("family, memory", [(VIT, RMT), (TIMM_VIT, CACHE)], ids=["vit-rmt", "timm_vit-grc_stream"])
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP2 by block"])
def test_others_wrap_the_loop(family: Family, memory: Any, way: str) -> None:
    """One forward for each backward, also where the last frame alone is in the loss."""
    from torch.distributed.fsdp import fully_shard

    targets = torch.tensor([[-100, -100, 1], [-100, -100, 0]])

    def gradients(wrapped: bool) -> dict[str, Tensor]:
        model = made(family, memory).train()
        loop: Any = SegmentLoop(model, segment_length=3)
        if wrapped and way == "FSDP2 by block":
            for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)):
                fully_shard(block)
        if wrapped:
            loop = nn.parallel.DistributedDataParallel(loop) if way == "DDP" else fully_shard(loop)
        loop(frames(), targets)[0].backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in grads.items()}

    expected = gradients(False)
    with one_process():
        found = gradients(True)
    assert found.keys() == expected.keys() and any("memory" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_timm_by_name() -> None:
    model = create_model("timm", architecture="vit_small_patch16_224", classes=5, memory=CACHE, **TIMM)
    awaken(model).eval()
    video, state = frames(), model.init_state(2)
    for frame in video.unbind(1):
        out = model(frame, state)
        state = out.state
    loop = SegmentLoop(model, 1)
    *_, last = loop.read(video, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(last.state.layers[0].cache_BMC, state.layers[0].cache_BMC)
    assert model.init_state(3).layers[0].segments_B.tolist() == [0, 0, 0]


def test_in_half_precision() -> None:
    for memory in (RMT, CACHE):
        half = made(VIT, memory).to(torch.bfloat16)
        assert watch(half, frames())[0].isfinite().all()  # of frames in float32, which transformers casts itself


def test_calls_that_would_forget_are_refused() -> None:
    frame = frames()[:, 0]
    for family in (VIT, TIMM_VIT):
        model = made(family, CACHE).train()
        refuses(r"memory_state.*init_memory_state", model, frame)
        with torch.no_grad():
            model(frame)
    with pytest.raises(
        ValueError, match=r"pixel_values of shape \(2, 3, 3, 16, 16\): give one frame a call.*SegmentLoop"
    ):
        made(VIT, CACHE)(frames())
    model = made(TIMM_VIT, CACHE).train()
    with pytest.raises(ValueError, match="masks: beside a memory a frame is read whole"):
        model(frame, is_causal=True, memory_state=model.init_memory_state(2))
    model.set_grad_checkpointing()
    refuses(r"grad_checkpointing.*set_grad_checkpointing", model, frame, memory_state=model.init_memory_state(2))
    learned = add_memory(VIT.build(), "memory_transformer").train()
    assert learned(frame).logits.requires_grad  # which carries nothing that could be forgotten


def videos(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two pictures in one of two orders, then a blank one, (B, 3, 1, 8, 8); and the order."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.zeros(2, 1, 8, 8)
    pictures[0, :, :4], pictures[1, :, :, :4] = 1, 1
    order = torch.randint(2, (rows,), generator=generator)
    video = torch.stack([pictures[order], pictures[1 - order], torch.zeros(rows, 1, 8, 8)], 1)
    return video + 0.1 * torch.randn(rows, 3, 1, 8, 8, generator=generator), order


def test_the_order_of_frames_is_told_behind_the_last_one() -> None:
    """A ViT alone, which is asked at the same blank frame, stays at chance."""
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=2, initializer_range=0.2, **sizes
    )
    scores = []
    for memory in (True, False):
        torch.manual_seed(0)
        model: Any = transformers.ViTForImageClassification(config)
        if memory:
            add_memory(model, "grc_stream", length=5)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(90):
            video, order = videos(32, step)
            logits = watch(model, video)[0][:, -1] if memory else model(video[:, -1]).logits
            optimizer.zero_grad()
            F.cross_entropy(logits, order).backward()
            optimizer.step()
        video, order = videos(256, 1000)
        with torch.no_grad():
            logits = watch(model.eval(), video)[0][:, -1] if memory else model.eval()(video[:, -1]).logits
        scores.append(float((logits.argmax(-1) == order).float().mean()))
    assert scores[0] > 0.95 and scores[1] < 0.65, scores
