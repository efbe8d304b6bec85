"""Models in a folder or on the Hugging Face hub: `save_pretrained`, `from_pretrained`, `push_to_hub`.

A folder holds config.json (arguments of the model), model.safetensors (weights and caches) and README.md (model card).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from cached_transformers.annotations import shown
from cached_transformers.extras import require
from cached_transformers.files import write_whole
from cached_transformers.registry import MODELS
from cached_transformers.state import nbytes

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
Model = TypeVar("Model", bound="PublishedModel")


class PublishedModel(nn.Module):
    """A model that records its arguments and can be saved, shared and loaded.

    Attributes:
        made_of: arguments by name; None for a copy that is being filled.
    """

    made_of: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__new__(cls)
        if args or kwargs:
            signature = inspect.signature(cls.__init__)
            try:
                given = signature.bind(model, *args, **kwargs).arguments
            except TypeError:  # __init__ raises it with a better message
                return model
            model.__dict__["made_of"] = {name: value for name, value in list(given.items())[1:]}
        return model

    def save_pretrained(self, folder: str | Path, *, results: Mapping[str, float] | None = None) -> None:
        """Write the model into a folder, each file completely or not at all, the config last.

        Args:
            results: scores for the card: {"perplexity on ...": 21.3}.

        Raises:
            ValueError: the model was changed after it was made (an adapter, an initial state), or made from objects
                that JSON cannot hold. NotWritten: e.g. the disk is full.
        """
        folder = Path(folder)
        config, weights = self._config(), _without_twins(self.state_dict())
        self._check_as_made()
        content = safetensors.torch.save(weights, {"format": "pt"})
        config["sha256"] = hashlib.sha256(content).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / WEIGHTS, content)
        if not (folder / CARD).exists():
            write_whole(folder / CARD, self._card(folder.name, config, results).encode())
        write_whole(folder / CONFIG, json.dumps(config, indent=2).encode())

    @classmethod
    def from_pretrained(cls: type[Model], name: str | Path, **hub: Any) -> Model:
        """Load a saved model, in evaluation mode.

        Args:
            name: a folder, or a repository of the Hugging Face hub.
            hub: revision, token, cache_dir, local_files_only, ... of the download.

        Raises:
            ValueError: a model of another class, or damaged files.
        """
        folder = Path(name)
        if not folder.is_dir():
            library = require("huggingface_hub", extra="language")
            folder = Path(library.snapshot_download(str(name), allow_patterns=[CONFIG, WEIGHTS], **hub))
        config = _read_config(folder / CONFIG)
        kind = config["model"]
        factory = MODELS.entry(kind).factory if kind in MODELS else None
        if not isinstance(factory, type) or not issubclass(factory, cls):
            raise ValueError(f"{name} holds a model {kind!r}, not a {cls.__name__}; load it with its own class")
        MODELS.check(kind, config["options"], path=f"{folder / CONFIG}")
        model = MODELS.create(kind, **config["options"])
        content = (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(content).hexdigest() != config["sha256"]:
            raise ValueError(f"{folder / WEIGHTS} does not match its checksum in {CONFIG}; fetch it again")
        stored, own = safetensors.torch.load(content), model.state_dict()
        places = {_place_of(own[name]): t for name, t in stored.items() if name in own}  # of tied weights
        stored |= {name: places[_place_of(t)] for name, t in own.items() if _place_of(t) in places}
        # Parameters have the model's dtype; caches may keep their own.
        model = model.to(next((stored[name].dtype for name, _ in model.named_parameters() if name in stored), None))
        model.load_state_dict(stored)
        return model.eval()  # type: ignore[return-value]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        results: Mapping[str, float] | None = None,
        private: bool | None = None,
        token: Any = None,
        **options: Any,
    ) -> Any:
        """Save the model into a repository of the Hugging Face hub, with a card.

        Args:
            repo_id: "user/name". results: see `save_pretrained`. options: of the upload (revision, ...).
        """
        api = require("huggingface_hub", extra="language").HfApi(token=token)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / repo_id.rpartition("/")[2]
            self.save_pretrained(folder, results=results)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)

    def _config(self) -> dict[str, Any]:
        kind = next((entry.name for entry in MODELS if entry.factory is type(self)), None)
        if kind is None:
            raise ValueError(
                f"{type(self).__name__} is not registered; register it (MODELS.register), or save its state_dict"
            )
        options = {**(self.made_of or {}), **(self.made_of or {}).get("options", {})}
        options.pop("options", None)
        for name, value in options.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{name}={shown(value)} cannot be stored in {CONFIG}; save the state_dict instead"
                ) from None
        return {"library_name": "cached_transformers", "model": kind, "options": options}

    def _check_as_made(self) -> None:
        """Refuse (ValueError) a model that `from_pretrained` could not load."""
        config = self._config()
        with torch.device("meta"):
            made = MODELS.create(config["model"], **config["options"])
        expected = {name: tuple(t.shape) for name, t in made.state_dict().items()}
        found = {name: tuple(t.shape) for name, t in self.state_dict().items()}
        if found != expected:
            name = sorted(expected.items() ^ found.items())[0][0]
            raise ValueError(
                f"{name} is {found.get(name, 'missing')}, but {expected.get(name, 'missing')} in a new "
                f"{type(self).__name__}: the model was changed; merge adapters, save an initial state by "
                "save_initial_state and remove it, or save the state_dict"
            )

    def _card(self, name: str, config: dict[str, Any], results: Mapping[str, float] | None) -> str:
        memory = config["options"].get("memory")
        tags = ", ".join(["cached-transformers", config["model"]])
        lines = [*("---", "library_name: cached_transformers", f"tags: [{tags}]", "---", "", f"# {name}", "")]
        lines += [f"A `{type(self).__name__}` of cached-transformers with memory={shown(memory)}.", ""]
        state: Any = getattr(self, "init_state", None)
        if state is not None:
            lines += [f"The initial state of a row takes {nbytes(state(1)):,} bytes.", ""]
        lines += ["```python", f"from cached_transformers.models import {type(self).__name__}", ""]
        lines += [f'model = {type(self).__name__}.from_pretrained("{name}")', "```"]
        if results:
            lines += ["", "| Measured | Result |", "|---|---|", *(f"| {k} | {v:g} |" for k, v in results.items())]
        return "\n".join([*lines, ""])


def is_ours(folder: Path) -> bool:
    """Return whether a folder holds a saved model of this package."""
    try:
        return bool(_read_config(folder / CONFIG))
    except (ValueError, OSError):
        return False


def _read_config(path: Path) -> dict[str, Any]:
    """Read the config that `save_pretrained` wrote (ValueError: another or a damaged file)."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; name a folder of save_pretrained")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; fetch it again") from None
    kinds = {"model": str, "options": dict, "sha256": str}
    if not isinstance(config, dict) or any(not isinstance(config.get(k), t) for k, t in kinds.items()):
        raise ValueError(f"{path} is of another library, or damaged; load_pretrained takes models of transformers")
    return config


def _place_of(t: Tensor) -> Any:
    return (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride())


def _without_twins(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without duplicates: of names that share one (tied weights), the first."""
    first: dict[Any, str] = {}
    for name, t in state.items():
        first.setdefault(name if t.numel() == 0 else _place_of(t), name)
    return {name: state[name].detach().contiguous().cpu().clone() for name in first.values()}
