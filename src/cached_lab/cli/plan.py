"""`cached plan RECIPE --gpus N`: memory, traffic and hours of a recipe, without its data or a GPU."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .arguments import add_recipe

if TYPE_CHECKING:
    from cached_lab.experiments.plan.plan import TrainingPlan

SIZES = ("vocabulary", "target_vocabulary", "classes", "image_size", "channels", "length")
COLUMNS = ("recipe", "parameters", "micro-batch x pieces", "GiB of a GPU", "TFLOP a step", "GiB sent a step", "hours")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="the memory, traffic and hours of a recipe, before it is trained",
        description="Rehearses one training step of the recipe's model on tensors without values, and counts the bytes "
        "that would be alive: weights, gradients, optimiser, states of the rows, activations and temporaries. Prints "
        "whether that fits, in which pieces, and about how many hours the training would take. Needs neither data nor "
        "a GPU.",
        epilog="examples: cached plan imagenet_pvt_small_grc --gpus 8; cached plan gpt2 --gpus 4 --card h100 "
        "--parallel fsdp model.depth=24. The exit status is 1 if a recipe does not fit.",
    )
    add_recipe(parser, "e.g. training.batch_size=256 training.precision=bfloat16", several=True)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes, a GPU each (default: 1)")
    parser.add_argument("--card", default="a100", help="a100 (the default), h100, h200, v100, l4 or rtx4090")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a GPU (default: the card's)")
    parser.add_argument(
        "--parallel", choices=("ddp", "fsdp", "none"), default="ddp", help="how several GPUs share the work"
    )
    parser.add_argument("--tflops", type=float, help="peak of a GPU (default: the card's, in the recipe's precision)")
    parser.add_argument("--mfu", type=float, default=0.35, help="share of the peak that is reached (default: 0.35)")
    parser.add_argument(
        "--link-gib-s", type=float, default=50.0, metavar="GIB", help="GiB/s between GPUs (default: 50)"
    )
    parser.add_argument(
        "--reserve-gib", type=float, default=4.0, metavar="GIB", help="left free for uncounted memory (default: 4)"
    )
    for name in SIZES:
        size = "tokens of a row" if name == "length" else f"{name.replace('_', ' ')} of the data"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{size}, if unknown")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="machine-readable output")
    form.add_argument("--markdown", action="store_true", help="one row of a table for each recipe")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan each recipe and print the plans."""
    from cached_lab.experiments.plan.plan import Machine, make_plan
    from cached_lab.experiments.plan.sizes import Given, sized
    from cached_lab.tasks.recipes import load_config

    names = ("gpus", "card", "memory_gib", "parallel", "tflops", "mfu", "link_gib_s", "reserve_gib")
    machine = Machine(**{name: getattr(arguments, name) for name in names})
    given = Given(**{name: getattr(arguments, name) for name in SIZES})
    configs = [load_config(name, arguments.overrides) for name in arguments.recipe.split(",")]
    plans = [make_plan(sized(config, given), machine) for config in configs]
    if arguments.json:
        found = [plan.to_dict() for plan in plans]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    elif arguments.markdown:
        rows = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *map(_cells, plans)]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        for plan in plans:
            print("\n".join([plan.name, *_lines(plan), ""]))
    return 0 if all(plan.fits for plan in plans) else 1


def _cells(plan: TrainingPlan) -> list[str]:
    """Return a row of the table."""
    return [
        f"`{plan.name}`",
        f"{plan.parameters / 1e6:,.1f} M",
        f"{plan.micro_batch:,} x {plan.accumulate}" if plan.fits else "does not fit",
        f"{plan.total / 2**30:,.1f}",
        f"{plan.flops / 1e12:,.2f}",
        f"{plan.sent / 2**30:,.2f}",
        f"{plan.hours:,.1f}",
    ]


def _lines(plan: TrainingPlan) -> list[str]:
    """Return the plan as text: MiB of a GPU by kind, and sentences."""
    machine = plan.machine
    parts = {**{part: size for part, size in plan.parts.items() if size}, "sum": plan.total}
    lines = [f"  {part:<40}{size / 2**20:>12,.1f} MiB" for part, size in parts.items()]
    cards = f"{machine.gpus} x {machine.card}" + (f", {machine.parallel}" if machine.gpus > 1 else "")
    each = f" of {plan.tokens:,} tokens" if plan.tokens else ""
    free = f"{machine.memory:g} GiB less {machine.reserve_gib:g} in reserve"
    lines.append(f"{plan.parameters:,} parameters, {plan.trained:,} trained; {plan.rows:,} rows{each} a step; {cards}")
    if plan.fits:
        room = f"; up to about {plan.room:,} rows would fit at once" if plan.room else ""
        lines.append(
            f"fits ({free}): micro-batch {plan.micro_batch:,} rows, training.accumulate={plan.accumulate}{room}"
        )
    else:
        lines.append(
            f"does not fit ({free}): {plan.total / 2**30:,.1f} GiB with a micro-batch of {plan.micro_batch:,}; try "
            "training.activation_checkpointing=true, --parallel fsdp, or a smaller model"
        )
    computing, sending = plan.seconds
    share = f"{machine.mfu:.0%} of {machine.peak(plan.precision):g} TFLOP/s ({plan.precision})"
    lines.append(
        f"{plan.flops / 1e12:,.3f} TFLOP a step: {computing:.4g} s at {share}; each GPU sends "
        f"{plan.sent / 2**30:,.3f} GiB: {sending:.4g} s at {machine.link_gib_s:g} GiB/s"
    )
    lines.append(f"{plan.steps:,} steps: about {plan.hours:,.1f} hours, without evaluation and loading")
    if plan.assumed:
        lines.append(f"assumed: {'; '.join(plan.assumed)}")
    lines.append("not counted: CUDA's context, workspaces of cuBLAS and cuDNN, allocator fragments (the reserve)")
    return lines
