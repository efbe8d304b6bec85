"""Drill: methods of PEFT beside memories, each of which trains, is saved, loaded and merged, or is refused by name.

A case is method/memory/order/seed. Orders: "frozen", the memory first, in no `modules_to_save`; "saved", the memory
first, in it; "after", the memory last; "loaded", as "frozen" with trained weights; "native", by the model's own
`add_adapter`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers import add_memory

from .frame import Failure

ORDERS = ("frozen", "saved", "after", "loaded", "native")
TEXT: dict[str, Any] = {"length": 2, "segment_length": 5}
MEMORIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("rmt", "armt", "grc_stream", "transformer_xl"), TEXT),
    "memorizing": {**TEXT, "length": 16, "k": 4},
    "outside_infini": {"segment_length": 5},
    "grc": {"length": 4},  # in BERT, the others in Llama and GPT-2
}
PROMPTS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {"num_virtual_tokens": 2},
    "PromptEncoderConfig": {"num_virtual_tokens": 2, "encoder_hidden_size": 8},
    "PrefixTuningConfig": {"num_virtual_tokens": 2},
    "MultitaskPromptTuningConfig": {"num_virtual_tokens": 2, "num_tasks": 2},
    "CPTConfig": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 4]},
}
UNSAVED: dict[str, dict[str, Any]] = {  # methods without `modules_to_save`
    "TrainableTokensConfig": {"token_indices": [3], "target_modules": ["embed_tokens", "word_embeddings", "wte"]},
    "AdaptionPromptConfig": {"adapter_len": 2, "adapter_layers": 1, "target_modules": None},
}
RANKS = "Lora LoHa LoKr Vera Delora Glora Gralora Hira HRA Miss Psoft Pvera RandLora Shira"
PLAIN = "Adamss Beft Deft Lily OSF Peanut TinyLora UniLora"
METHODS: dict[str, dict[str, Any]] = {
    **{f"{name}Config": {"r": 2} for name in RANKS.split()},
    **{f"{name}Config": {} for name in PLAIN.split()},
    "LoraConfig dora": {"r": 2, "use_dora": True},
    "LoraConfig rslora": {"r": 2, "use_rslora": True},
    "LoraConfig all": {"r": 2, "target_modules": "all-linear"},
    "LNTuningConfig": {"target_modules": ["LayerNorm", "input_layernorm", "ln_1"]},
    "LNTuningConfig norm": {"target_modules": ["LayerNorm", "input_layernorm", "ln_1", "norm"]},
    "AdaLoraConfig": {"total_step": 10, "init_r": 3, "target_r": 2, "tinit": 1, "tfinal": 1},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"oft_block_size": 4},
    "BOFTConfig": {"boft_block_size": 4},
    "FourierFTConfig": {"n_frequency": 5},
    "PolyConfig": {"r": 2, "n_tasks": 2, "n_skills": 2, "n_splits": 1},
    "C3AConfig": {"block_size": 4},
    "RoadConfig": {"group_size": 4},
    "VBLoRAConfig": {"r": 2, "vector_length": 4, "num_vectors": 8},
    "WaveFTConfig": {"n_frequency": 8},
    "SupertuningConfig": {"sparsity": 0.5},
    **PROMPTS,
    **UNSAVED,
}
TASKS = ("PolyConfig", "MultitaskPromptTuningConfig")
OF_TEXT = (*PROMPTS, *TASKS, "AdaptionPromptConfig")
TARGETS = ["q_proj", "v_proj", "self.query", "self.value", "attn.c_attn"]


def cases(count: int, seed: int) -> Iterator[str]:
    """Methods with the memories and orders that they know, in random order."""
    every = [
        f"{method}/{memory}/{order}/{seed}"
        for method, memory, order in product(METHODS, MEMORIES, ORDERS)
        if not (method in OF_TEXT and (memory == "grc" or order == "native"))
        and not (method in UNSAVED and order in ("saved", "native"))
        and not (method == "LoraConfig dora" and order == "native")  # load_adapter loses its magnitudes
        and not (order == "frozen" and (memory == "transformer_xl" or method == "LoraConfig all"))
    ]
    Random(seed).shuffle(every)
    yield from every[:count]


def prepare(shared: Path) -> None:
    """Import the heavy packages."""
    import peft  # noqa: F401
    import transformers
    from integrations.transformers_hosts import BERT, LLAMA

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    add_memory(LLAMA.build(), "rmt", **TEXT), BERT.build()


def attempt(case: str, folder: Path) -> None:
    """Train a method beside a memory, and do some of the things that users do then."""
    import peft

    if hasattr(peft, case.split("/")[0].split()[0]):  # an older PEFT has fewer methods
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            Trial(*case.split("/")[:3], Random(case), folder).run()


class Trial:
    """One method beside one memory.

    Args:
        random: gives the text, and what is done with the trained model.
    """

    def __init__(self, method: str, memory: str, order: str, random: Random, folder: Path) -> None:
        from integrations.transformers_hosts import BERT, GPT2, LLAMA, words

        self.method, self.memory, self.order, self.random, self.folder = method, memory, order, random, folder
        other = method in PROMPTS or method.startswith(("Lora", "IA3", "LN"))  # methods that need no linear layers
        other &= memory != "transformer_xl"
        self.host: Any = BERT if memory == "grc" else random.choice([LLAMA, GPT2]) if other else LLAMA
        self.ids = words(2, random.randint(11, 16), random.randint(0, 99))
        self.ids[:, 0] = 3  # a token that is trained
        self.tasks = {"task_ids": torch.tensor([0, 1])} if method in TASKS else {}

    def run(self) -> None:
        """Raise Failure unless the method works with the memory, or is refused by name."""
        try:
            model = self.make()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for _ in range(3):
                self.step(model)
        except Exception as error:
            if not self.fails_without(type(error), self.step):
                self.check_refusal(error)
            return
        if self.order == "frozen" or (self.order == "after" and self.method in UNSAVED):
            raise Failure("expected a refusal of the frozen or unsaved memory, found a training")
        self.check_trained(model, before)
        with torch.no_grad():
            wanted = self.logits(model.eval())
            actions = [self.copy, self.pickle, self.narrow, self.disable]
            if self.memory != "grc" and self.method != "LilyConfig":  # whose experts depend on all tokens of a call
                actions.append(self.generate)
            if self.memory != "grc" or self.order != "loaded":  # without `modules_to_save` no cache is saved
                actions.append(self.load)
            actions = self.random.sample(actions, 2)
            if self.order != "native" and hasattr(model, "merge_and_unload"):
                actions.append(self.merge)
            for action in actions:
                try:
                    action(model, wanted)
                except Exception as error:
                    alike = not isinstance(error, Failure) and self.fails_without(type(error), action)
                    if not alike:
                        raise

    def base(self, memory: bool = True) -> Any:
        """The host with its memory; for "loaded" with weights as of a training."""
        model = self.remember(self.host.build(), memory)
        if memory and self.order == "loaded":
            model.load_state_dict({name: t + 0.1 * ("memory" in name) for name, t in model.state_dict().items()})
        return model

    def make(self, memory: bool = True) -> Any:
        """The model with its adapter, and with its memory or without."""
        import peft

        options = dict(METHODS[self.method])
        if self.method in OF_TEXT:
            options["task_type"] = "CAUSAL_LM"
        if self.method not in PROMPTS:
            options.setdefault("target_modules", TARGETS)
        config = getattr(peft, self.method.split()[0])(**options)
        if memory and self.order in ("saved", "native"):
            config.modules_to_save = ["memory"]
        model = self.base(memory and self.order != "after")
        torch.manual_seed(2)
        if self.order == "native":
            model.add_adapter(config)
            return model
        return self.remember(peft.get_peft_model(model, config), memory and self.order == "after")

    def remember(self, model: Any, memory: bool = True) -> Any:
        """The model with a memory."""
        torch.manual_seed(1)
        return add_memory(model, self.memory, **MEMORIES[self.memory]) if memory else model

    def logits(self, model: Any, ids: Tensor | None = None) -> Tensor:
        return model(input_ids=self.ids if ids is None else ids, **self.tasks).logits  # type: ignore[no-any-return]

    def step(self, model: Any) -> None:
        model.train().zero_grad()
        model(input_ids=self.ids, labels=self.ids, **self.tasks).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0 if p.grad is None else 0.05 * p.grad.sign()

    def fails_without(self, kind: type[Exception], action: Callable[..., None]) -> bool:
        """True if the method raises an error of this kind on the host without a memory, too."""
        try:
            plain = self.make(memory=False)
            action(*((plain,) if action == self.step else (plain, self.logits(plain.eval()))))
        except kind:
            return True
        return False

    def check_refusal(self, error: Exception) -> None:
        """Raise Failure unless it is our refusal, with its reason."""
        if not isinstance(error, ValueError):
            raise error
        words = ["prefix tuning"] if self.method == "PrefixTuningConfig" else []
        if self.order == "frozen" or (self.order == "after" and self.method in UNSAVED):
            words.append("modules_to_save")
        if self.method == "LNTuningConfig norm":  # a memory's own norm is none that it can read through an adapter
            words.append("the memory cannot read")
        if not any(word in str(error) for word in words):
            raise Failure(f"expected a method that works, or one of {words} in the message, found: {error}")

    def check_trained(self, model: Any, before: dict[str, Tensor]) -> None:
        """Raise Failure unless memory and adapter trained, and a memory that was loaded did not."""
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        of_memory = {name for name in before if ".memory." in f".{name}" and "original_module" not in name}
        if self.order == "loaded":
            if own := {name for name in changed & of_memory if name.endswith(tuple(self.base().state_dict()))}:
                raise Failure(f"expected a memory as it was loaded, found changed {sorted(own)}")
        elif 2 * len(unchanged := of_memory - changed) > len(of_memory):
            raise Failure(f"expected a memory that trains, found unchanged {sorted(unchanged)}")
        if kept := {name for name in changed if "original_module" in name}:
            raise Failure(f"expected the memory beside its copies as it was, found changed {sorted(kept)}")
        if not changed - of_memory:
            raise Failure("expected an adapter that trains, found none changed")

    def equal(self, what: str, found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
        error = (found - wanted).abs().max().item()
        if not error <= tolerance:
            raise Failure(f"{what}: expected logits within {tolerance}, found {error:.2e}")

    def generate(self, model: Any, wanted: Tensor) -> None:
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
        found, ids = model.generate(input_ids=self.ids, **options, **self.tasks), self.ids
        for _ in range(6):
            ids = torch.cat([ids, self.logits(model, ids)[:, -1:].argmax(-1)], 1)
        if not torch.equal(found, ids):
            raise Failure(f"generate: expected {ids.tolist()}, found {found.tolist()}")

    def copy(self, model: Any, wanted: Tensor) -> None:
        self.equal("deepcopy", self.logits(copy.deepcopy(model)), wanted)

    def pickle(self, model: Any, wanted: Tensor) -> None:
        torch.save(model, self.folder / "model.pt")
        self.equal("torch.save", self.logits(torch.load(self.folder / "model.pt", weights_only=False)), wanted)

    def narrow(self, model: Any, wanted: Tensor) -> None:
        error = self.logits(copy.deepcopy(model).bfloat16()) - wanted
        if not (share := error.square().mean().sqrt().item() / wanted.std().item()) <= 0.5:  # a token may be exchanged
            raise Failure(f"bfloat16: expected an error within 0.5 of the spread of the logits, found {share:.2f}")

    def disable(self, model: Any, wanted: Tensor) -> None:
        """Without its adapter the model is as before, except for a cache, which no adapter holds."""
        if self.order != "native" and self.memory != "grc" and self.method not in PROMPTS:
            with model.disable_adapter():
                self.equal("disable_adapter", self.logits(model), self.logits(self.base().eval()))

    def load(self, model: Any, wanted: Tensor) -> None:
        """Save the adapter, and load it into the host with the memory."""
        import peft

        model.save_pretrained(self.folder / "adapter")
        base = self.base(any("memory" in name for name, _ in model.named_modules()))
        if self.order == "native":
            base.load_adapter(str(self.folder / "adapter"))
        else:
            base = peft.PeftModel.from_pretrained(base, self.folder / "adapter")
        self.equal("load", self.logits(base.eval()), wanted)

    def merge(self, model: Any, wanted: Tensor) -> None:
        """Merge; then quantise, or save and load."""
        from torch.ao.quantization import quantize_dynamic

        from cached_transformers import load_pretrained

        if hasattr(model, "merge_adapter"):
            for switch in (model.merge_adapter, model.unmerge_adapter):
                switch()
                self.equal(switch.__name__, self.logits(model), wanted, 1e-4)
        merged = model.merge_and_unload().eval()
        self.equal("merge_and_unload", self.logits(merged), wanted, 1e-4)
        if self.random.random() < 0.5:
            quantised = quantize_dynamic(copy.deepcopy(merged), {nn.Linear}, dtype=torch.qint8)
            self.equal("quantize_dynamic", self.logits(quantised), wanted, 0.3)
        elif not self.method.startswith("LNTuningConfig"):  # which leaves the copies of modules in the model
            merged.save_pretrained(self.folder / "merged")
            self.equal("load_pretrained", self.logits(load_pretrained(str(self.folder / "merged"))), wanted, 1e-4)


SUMMARY = "Methods of PEFT beside memories, added before and after: trained, saved, loaded, merged and copied"
COUNT, SAMPLE = 320, 6
