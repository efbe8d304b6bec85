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

from .frame import Drill, Failure

ORDERS = ("frozen", "saved", "after", "loaded", "native")
MEMORIES: dict[str, dict[str, Any]] = {
    "rmt": {"name": "rmt", "length": 2, "segment_length": 5},
    "armt": {"name": "armt", "length": 2, "segment_length": 5},
    "grc_stream": {"name": "grc_stream", "length": 4, "segment_length": 5},
    "transformer_xl": {"name": "transformer_xl", "length": 4, "segment_length": 5},
    "grc": {"name": "grc", "length": 4},  # in BERT
}
_TEXT = {"task_type": "CAUSAL_LM"}
_PROMPT = {**_TEXT, "num_virtual_tokens": 2}
_LEARNED = {
    "PromptTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 8},
    "PrefixTuningConfig": {},
    "MultitaskPromptTuningConfig": {"num_tasks": 2},
}
_LAYERS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10, "init_r": 3, "target_r": 2, "tinit": 1, "tfinal": 1},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"oft_block_size": 4},
    "BOFTConfig": {"boft_block_size": 4},
    "FourierFTConfig": {"n_frequency": 5},
    "PolyConfig": {**_TEXT, "r": 2, "n_tasks": 2, "n_skills": 2, "n_splits": 1},
    "C3AConfig": {"block_size": 4},
    "RoadConfig": {"group_size": 4},
    "VBLoRAConfig": {"r": 2, "vector_length": 4, "num_vectors": 8},
    "WaveFTConfig": {"n_frequency": 8},
    "AdamssConfig": {},
    "BeftConfig": {},
    "DeftConfig": {},
    "LilyConfig": {},
    "OSFConfig": {},
    "PeanutConfig": {},
    "SupertuningConfig": {"sparsity": 0.5},
    "TinyLoraConfig": {},
    "UniLoraConfig": {},
}
_RANKS = ("LoHa", "LoKr", "Vera", "Delora", "Glora", "Gralora", "Hira", "HRA", "Miss", "Psoft", "Pvera", "RandLora")
METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 2},
    "LoraConfig dora": {"r": 2, "use_dora": True},
    "LoraConfig rslora": {"r": 2, "use_rslora": True},
    "LoraConfig all": {"r": 2, "target_modules": "all-linear"},
    "LNTuningConfig": {"target_modules": ["norm", "LayerNorm", "input_layernorm"]},
    "TrainableTokensConfig": {"token_indices": [3], "target_modules": ["embed_tokens", "word_embeddings"]},
    "AdaptionPromptConfig": {**_TEXT, "adapter_len": 2, "adapter_layers": 1, "target_modules": None},
    "CPTConfig": {**_TEXT, "cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 4]},
    **{f"{name}Config": {"r": 2} for name in (*_RANKS, "Shira")},
    **_LAYERS,
    **{name: {**_PROMPT, **options} for name, options in _LEARNED.items()},
}
PROMPTS = (*_LEARNED, "CPTConfig")
UNWRITTEN = ("TrainableTokensConfig", "AdaptionPromptConfig")
"""Methods without `modules_to_save`."""
STEPS = 2


def cases(count: int, seed: int) -> Iterator[str]:
    """Methods that the installed PEFT has, with the memories and orders that they know, in random order."""
    import peft

    import cached_transformers  # noqa: F401  (mends a torchvision that PEFT could not import)

    every = [
        f"{method}/{memory}/{order}/{seed}"
        for method, memory, order in product(METHODS, MEMORIES, ORDERS)
        if hasattr(peft, method.split()[0])
        and not (memory == "grc" and "task_type" in METHODS[method])
        and not (order == "saved" and method in UNWRITTEN)
        and not (order == "native" and (method in UNWRITTEN or "task_type" in METHODS[method] or "dora" in method))
        and not (order == "frozen" and (memory == "transformer_xl" or method == "LoraConfig all"))
    ]
    Random(seed).shuffle(every)
    yield from every[:count]


def prepare(shared: Path) -> None:
    """Import the heavy packages."""
    import peft  # noqa: F401
    import torch
    import transformers
    from integrations import transformers_hosts
    from transformers import BertForMaskedLM, LlamaForCausalLM  # noqa: F401

    import cached_transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cached_transformers.add_memory(transformers_hosts.LLAMA.build(), "rmt", length=2, segment_length=5)


def attempt(case: str, folder: Path) -> None:
    """Train a method beside a memory, and do some of the things that users do then."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        Trial(*case.split("/")[:3], Random(case)).run(folder)


class Trial:
    """One method beside one memory.

    Args:
        random: gives the text's length, and what is done with the trained model.
    """

    def __init__(self, method: str, memory: str, order: str, random: Random) -> None:
        import torch
        from integrations.transformers_hosts import BERT, LLAMA, words

        self.method, self.memory, self.order, self.random = method, memory, order, random
        self.host = BERT if memory == "grc" else LLAMA
        self.prompts = 2 if method in PROMPTS else 0
        length = 13 if self.prompts else random.randint(11, 16)  # the prompt and the text are whole segments
        self.ids = words(2, length, random.randint(0, 99))
        self.ids[:, 0] = 3  # a token that is trained
        self.extra = {}
        if method in ("PolyConfig", "MultitaskPromptTuningConfig"):
            self.extra = {"task_ids": torch.tensor([0, 1])}

    def run(self, folder: Path) -> None:
        """Raise Failure unless the method works with the memory, or is refused by name."""
        import torch

        try:
            model = self.make()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for _ in range(STEPS):
                self.step(model)
        except Exception as refusal:
            if not self.fails_without(type(refusal), self.step):
                self.check_refusal(refusal)
            return
        if self.order == "frozen" or (self.order == "after" and self.method in UNWRITTEN):
            raise Failure("expected a refusal of the frozen or unsaved memory, found a training")
        self.check_trained(model, before)
        with torch.no_grad():
            wanted = self.logits(model.eval())
            actions = [self.copy, self.pickle, self.narrow]
            if self.memory != "grc":
                actions.append(self.generate)
            if (
                self.memory != "grc" or self.order != "loaded"
            ):  # of a cache without `modules_to_save` PEFT saves nothing
                actions.append(self.load)
            for action in self.random.sample(actions, 2):
                try:
                    action(model, wanted, folder)
                except Exception as error:
                    if isinstance(error, Failure) or not self.fails_without(
                        type(error), lambda plain, run=action: run(plain, self.logits(plain.eval()), folder)
                    ):
                        raise
            if self.order != "native" and hasattr(model, "merge_and_unload"):
                self.merge(model, wanted, folder)

    def base(self) -> Any:
        """The host with its memory; for "loaded" with weights as of a training."""
        import torch

        from cached_transformers import add_memory

        model = self.host.build()
        if self.order != "after":
            torch.manual_seed(1)
            add_memory(model, **self.options)
        if self.order == "loaded":
            state = {
                n: t + 0.1 if "memory" in n and t.is_floating_point() else t for n, t in model.state_dict().items()
            }
            model.load_state_dict(state)
        return model

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `add_memory`."""
        given = dict(MEMORIES[self.memory])
        return {"memory": given.pop("name"), **given}

    def config(self, memory: bool = True) -> Any:
        import peft

        options = dict(METHODS[self.method])
        if self.method not in PROMPTS:
            options.setdefault("target_modules", ["q_proj", "v_proj", "self.query", "self.value"])
        if memory and self.order in ("saved", "native"):
            options["modules_to_save"] = ["memory"]
        cls = getattr(peft, self.method.split()[0])
        save = options.pop("modules_to_save", None) if self.prompts else None  # no option of prompts, but an attribute
        config = cls(**{name: value for name, value in options.items() if value is not None})
        if save:
            config.modules_to_save = save
        return config

    def make(self, memory: bool = True) -> Any:
        """The model with memory and adapter."""
        import peft
        import torch

        from cached_transformers import add_memory

        model = self.base() if memory else self.host.build()
        torch.manual_seed(2)
        if self.order == "native":
            model.add_adapter(self.config(memory))
            return model
        model = peft.get_peft_model(model, self.config(memory))
        return add_memory(model, **self.options) if memory and self.order == "after" else model

    def logits(self, model: Any, ids: Any = None) -> Any:
        return model(input_ids=self.ids if ids is None else ids, **self.extra).logits

    def step(self, model: Any) -> None:
        import torch

        model.train().zero_grad()
        model(input_ids=self.ids, labels=self.ids, **self.extra).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0 if p.grad is None else 0.05 * p.grad.sign()

    def fails_without(self, kind: type, action: Callable[[Any], None]) -> bool:
        """True if the method raises an error of this kind on the host without a memory, too."""
        try:
            action(self.make(memory=False))
        except kind:
            return True
        return False

    def check_refusal(self, refusal: Exception) -> None:
        """Raise Failure unless it is our refusal, with its reason."""
        if not isinstance(refusal, ValueError):
            raise refusal
        words = ["prefix tuning"] if self.method == "PrefixTuningConfig" else []
        if self.order == "frozen" or (self.order == "after" and self.method in UNWRITTEN):
            words.append("modules_to_save")
        if not any(word in str(refusal) for word in words):
            raise Failure(f"expected a method that works, or one of {words} in the message, found: {refusal}")

    def check_trained(self, model: Any, before: dict[str, Any]) -> None:
        """Memory and adapter trained; a loaded memory stays, unless the adapter is in it."""
        import torch

        after = dict(model.named_parameters())
        changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
        of_memory = {name for name in after if ".memory." in f".{name}" and "original_module" not in name}
        if self.order == "loaded":
            own = tuple(self.base().state_dict())
            plain = {name for name in changed & of_memory if name.endswith(own)}
            if plain:
                raise Failure(f"expected a memory as it was loaded, found changed {sorted(plain)}")
        elif of_memory and not changed & of_memory:
            raise Failure(f"expected a memory that trains, found unchanged {sorted(of_memory)}")
        if not changed - of_memory:
            raise Failure("expected an adapter that trains, found none changed")

    def equal(self, what: str, found: Any, wanted: Any, tolerance: float) -> None:
        error = (found - wanted).abs().max().item()
        if not error <= tolerance:
            raise Failure(f"{what}: expected logits within {tolerance}, found {error:.2e}")

    def generate(self, model: Any, wanted: Any, folder: Path) -> None:
        import torch

        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
        found = model.generate(input_ids=self.ids, **options, **self.extra)
        ids = self.ids
        for _ in range(6):
            ids = torch.cat([ids, self.logits(model, ids)[:, -1:].argmax(-1)], 1)
        if not torch.equal(found, ids):
            raise Failure(f"generate: expected {ids.tolist()}, found {found.tolist()}")

    def copy(self, model: Any, wanted: Any, folder: Path) -> None:
        self.equal("deepcopy", self.logits(copy.deepcopy(model)), wanted, 0)

    def pickle(self, model: Any, wanted: Any, folder: Path) -> None:
        import torch

        torch.save(model, folder / "model.pt")
        self.equal("torch.save", self.logits(torch.load(folder / "model.pt", weights_only=False)), wanted, 0)

    def narrow(self, model: Any, wanted: Any, folder: Path) -> None:
        import torch

        half = self.logits(copy.deepcopy(model).bfloat16())
        if half.dtype != torch.bfloat16:
            raise Failure(f"bfloat16: found {half.dtype}")
        self.equal("bfloat16", half.float(), wanted, 0.2)

    def load(self, model: Any, wanted: Any, folder: Path) -> None:
        """Save the adapter, and load it into the host with the memory."""
        import peft
        import torch

        from cached_transformers import add_memory

        model.save_pretrained(folder / "adapter")
        base = self.base()
        if self.order == "after":
            torch.manual_seed(1)
            add_memory(base, **self.options)
        if self.order == "native":
            base.load_adapter(str(folder / "adapter"))
            self.equal("load_adapter", self.logits(base.eval()), wanted, 1e-6)
        base = self.base() if self.order == "native" else base
        loaded = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
        self.equal("PeftModel.from_pretrained", self.logits(loaded), wanted, 1e-6)

    def merge(self, model: Any, wanted: Any, folder: Path) -> None:
        """Merge, where the method merges without a memory; then save and load, or quantise."""
        import torch
        from torch.ao.quantization import quantize_dynamic

        from cached_transformers import load_pretrained

        try:
            self.make(memory=False).merge_and_unload()
        except (NotImplementedError, ValueError, AttributeError):
            return
        merged = model.merge_and_unload()
        self.equal("merge_and_unload", self.logits(merged.eval()), wanted, 1e-4)
        if self.random.random() < 0.5:
            quantised = quantize_dynamic(copy.deepcopy(merged), {torch.nn.Linear}, dtype=torch.qint8)
            self.equal("quantize_dynamic", self.logits(quantised), wanted, 0.2)
        elif self.method != "LNTuningConfig":  # which leaves the copies of modules in the model
            merged.save_pretrained(folder / "merged")
            self.equal("load_pretrained", self.logits(load_pretrained(str(folder / "merged"))), wanted, 1e-4)


DRILL = Drill(
    name="adapters",
    summary="Methods of PEFT beside memories, added before and after: trained, saved, loaded, merged and copied",
    cases=cases,
    attempt=attempt,
    count=200,
    sample=6,
    prepare=prepare,
)
