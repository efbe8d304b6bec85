"""Loss, running sums, evaluation of a split, and the files that metrics go to."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.extras import require

from .checkpoint import capture_rng, restore_rng
from .distributed import World
from .loader import evaluation_batches

# B rows, K classes


def forward(model: Callable[..., Any], batch: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits (B, K), targets (B) and the auxiliary loss (or None) of one batch, on `device`.

    A model may return a `ModelOutput` or, as models of others do, the logits alone.
    """
    padding = {} if batch.padding is None else {"padding": batch.padding.to(device, non_blocking=True)}
    output = model(batch.inputs.to(device, non_blocking=True), **padding)
    targets_B = batch.targets.to(device, non_blocking=True)
    if isinstance(output, Tensor):
        return output, targets_B, None
    return output.outputs, targets_B, output.auxiliary_loss


def score_width(classes: int) -> int:
    """How many sums `sums` gives for so many classes: top-5 accuracy says little among ten."""
    return 4 if classes > 10 else 3


def sums(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """[sum of cross entropies in nats, correct rows, rows], float64; with more than ten classes rows with the target
    among the five largest logits stand before the rows.

    `targets` are classes (B), or shares of classes (B, K), of which the largest then counts as the right one.
    """
    loss = F.cross_entropy(logits_BK.float(), targets, reduction="sum").detach()
    target_B = targets if targets.dim() == 1 else targets.argmax(-1)
    right = [(logits_BK.argmax(-1) == target_B).sum()]
    if score_width(logits_BK.shape[-1]) == 4:
        right.append((logits_BK.topk(5).indices == target_B[:, None]).any(-1).sum())
    return torch.stack([part.double() for part in (loss, *right, loss.new_tensor(len(target_B)))])


def averages(total: Tensor) -> dict[str, float]:
    """{loss, accuracy} (and top5_accuracy) from what `sums` added up."""
    loss, correct, *top5, rows = total.tolist()
    found = {"loss": loss / rows, "accuracy": correct / rows}
    return found | {"top5_accuracy": top5[0] / rows} if top5 else found


def with_intervals(values: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of a split with Wilson's 95 % interval of each accuracy: the chance in drawing the rows, not in the seed.

    `values` holds the number of rows under "rows"; without it they are returned as they are.
    """
    from cached_transformers.experiments.statistics import wilson_interval

    found = dict(values)
    rows = int(values.get("rows") or 0)
    for name in [key for key in values if rows and (key == "accuracy" or key.endswith("_accuracy"))]:
        interval = wilson_interval(round(values[name] * rows), rows)
        found[f"{name}_interval"] = [interval.low, interval.high]
    return found


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a `with` block that leaves no trace: modes, buffers and random states come back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rng = capture_rng()
    try:
        with torch.no_grad():
            yield
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    finally:
        for module, mode in modes:  # parents come before their children, so that a child frozen in eval stays so
            if module.training != mode:
                module.train(mode)
        restore_rng(rng)


def evaluate(
    model: nn.Module,
    dataset: Any,
    world: World,
    batch_size: int,
    workers: int = 0,
    inside: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, float]:
    """Mean loss (nats) and accuracy (0..1) over the whole dataset, in evaluation mode and float32, and the rows scored.

    Processes share the rows; sums are exact for uneven shares. The model and the random states are left as they were.

    Args:
        workers: processes that load data.
        inside: called with the model once it is in evaluation mode; forwards run in the context that it returns.

    Raises:
        ValueError: no row could be used.
    """
    total: Tensor | float = 0.0
    pin_memory = world.device.type == "cuda"
    with untouched(model), inside(model):
        for batch in evaluation_batches(dataset, batch_size, world.rank, world.size, workers, pin_memory):
            logits_BK, targets_B, _ = forward(model, batch, world.device)
            total = total + sums(logits_BK, targets_B)
    if not isinstance(total, Tensor):
        total = torch.zeros(score_width(dataset.classes), dtype=torch.float64, device=world.device)
    total = world.sum(total)
    if not total[-1]:
        raise ValueError(f"no row of the {getattr(dataset, 'split', '')} split could be used; fetch the data again")
    return {**averages(total), "rows": int(total[-1])}


def tallies(model: nn.Module, world: World) -> dict[str, Tensor]:
    """What the modules of a model counted since they were last asked, over all processes: (sum, count) by name.

    A module takes part by a method `tallies()`, which returns such pairs of tensors and begins anew; the pairs of one
    name are added up. Every process must ask.
    """
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if callable(own := getattr(module, "tallies", None)):
            for name, pair in own().items():
                found[name] = found.get(name, 0) + pair.double()
    return {name: world.sum(pair).cpu() for name, pair in found.items()}


def jsonable(value: Any) -> Any:
    """The same tree with null in place of non-finite numbers, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, flushed line by line.

    Args:
        path: the file; it is appended to.
        step: lines of later steps, which a resumed run will write again, are removed, as is a line cut short.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        text = "".join(f"{json.dumps(line)}\n" for line in kept)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; numbers that JSON does not know (infinities, not a number) become null."""
        self._file.write(f"{json.dumps(jsonable(line), allow_nan=False)}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; none when it does not exist, and an unfinished last line is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON; the file was changed by hand") from None
    return parsed


class EventFiles:
    """TensorBoard event files, when wanted.

    Args:
        folder: where they go.
        wanted: True, False, or "auto" (when tensorboard is installed).
        step: the run continues after this step.

    Raises:
        ImportError: wanted is True and tensorboard is not installed.
    """

    def __init__(self, folder: Path, wanted: Literal["auto", True, False], step: int) -> None:
        self._writer: Any = None
        if wanted is True or (wanted == "auto" and importlib.util.find_spec("tensorboard") is not None):
            require("tensorboard", extra="logging")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one metrics line under its split."""
        if self._writer is None:
            return
        for key, value in line.items():
            if key not in ("step", "split", "rows") and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{line['split']}/{key}", value, line["step"])

    def close(self) -> None:
        """Write what is pending and close."""
        if self._writer is not None:
            self._writer.close()
