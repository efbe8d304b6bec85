"""`cached plan RECIPE --gpus N`: memory, traffic and hours that a recipe would take, without its data or a GPU."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .arguments import add_recipe

if TYPE_CHECKING:
    from cached_lab.experiments.plan.plan import Plan

SIZES = ("vocabulary", "target_vocabulary", "classes", "image_size", "channels", "length")
COLUMNS = ("recipe", "parameters", "micro-batch x pieces", "GiB of a GPU", "TFLOP a step", "GiB sent a step", "hours")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="the memory, traffic and hours of a recipe, before it is trained",
        description="Builds the recipe's model without weights, rehearses one training step on tensors without values, "
        "and counts what would be alive: weights, gradients, optimiser, the states of the rows, activations and "
        "temporaries. Says whether that fits, in which pieces, and for about how long the recipe would train. Neither "
        "data nor a GPU are needed.",
        epilog="examples: cached plan imagenet_pvt_small_grc --gpus 8; cached plan gpt2 --gpus 4 --card h100 "
        "--parallel fsdp model.depth=24. The exit status is 1 where a recipe does not fit.",
    )
    add_recipe(parser, "e.g. training.batch_size=256 training.precision=bfloat16", several=True)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes, a GPU each (default: 1)")
    parser.add_argument("--card", default="a100", help="a100 (the default), h100, h200, v100, l4 or rtx4090")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a GPU (default: the card's)")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp", "none"),
        default="ddp",
        help="how several GPUs share the work; `cached train` under torchrun does ddp, the default",
    )
    parser.add_argument("--tflops", type=float, help="peak of a GPU (default: the card's, in the recipe's precision)")
    parser.add_argument("--mfu", type=float, default=0.35, help="share of the peak that is reached (default: 0.35)")
    parser.add_argument(
        "--link-gib-s", type=float, default=50.0, metavar="GIB", help="GiB a second between GPUs (default: 50)"
    )
    parser.add_argument(
        "--reserve-gib", type=float, default=4.0, metavar="GIB", help="left free for what is not counted (default: 4)"
    )
    for name in SIZES:
        what = "tokens of a row" if name == "length" else f"{name.replace('_', ' ')} of the data"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{what}, if they are not known")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="machine-readable output")
    shown.add_argument("--markdown", action="store_true", help="one row of a table for each recipe")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan each of the recipes and print what was found."""
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
        print("\n".join(markdown(plans)))
    else:
        _print(plans)
    return 0 if all(plan.fits for plan in plans) else 1


def markdown(plans: list[Plan]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' + ' ---: |' * (len(COLUMNS) - 1)}"]
    return [*lines, *(f"| {' | '.join([f'`{plan.name}`', *cells(plan)])} |" for plan in plans)]


def cells(plan: Plan) -> list[str]:
    """A row of the table, behind the name."""
    pieces = f"{plan.micro_batch:,} x {plan.accumulate}" if plan.fits else "does not fit"
    return [
        f"{plan.parameters / 1e6:,.1f} M",
        pieces,
        f"{plan.total / 2**30:,.1f}",
        f"{plan.flops / 1e12:,.2f}",
        f"{plan.sent / 2**30:,.2f}",
        f"{plan.hours:,.1f}",
    ]


def _print(plans: list[Plan]) -> None:
    from rich.table import Table

    from cached_lab.experiments.reports.terminal import open_console

    console = open_console()
    for plan in plans:
        table = Table(title=plan.name, title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("bytes of a GPU")
        table.add_column("MiB", justify="right")
        for part, size in plan.parts.items():
            if size:
                table.add_row(part, f"{size / 2**20:,.1f}")
        table.add_row("[bold]together[/bold]", f"[bold]{plan.total / 2**20:,.1f}[/bold]")
        console.print(table)
        console.print("\n".join(sentences(plan)), markup=False)
        console.print()


def sentences(plan: Plan) -> list[str]:
    """What the plan says beside its bytes."""
    machine = plan.machine
    room = machine.memory - machine.reserve_gib
    cards = f"{machine.gpus} x {machine.card}" + (f", {machine.parallel}" if machine.gpus > 1 else "")
    each = f" of {plan.tokens:,} tokens" if plan.tokens else ""
    free = f"{machine.memory:g} GiB less {machine.reserve_gib:g} in reserve"
    lines = [
        f"{plan.parameters:,} parameters, {plan.trained:,} of them trained; {plan.rows:,} rows{each} a step; {cards}"
    ]
    if plan.fits:
        lines.append(
            f"fits ({free}): micro-batch {plan.micro_batch:,} rows, training.accumulate={plan.accumulate}"
            + (f"; up to about {plan.room:,} rows would fit at once" if plan.room else "")
        )
    else:
        lines.append(
            f"does not fit: {plan.total / 2**30:,.1f} GiB with a micro-batch of {plan.micro_batch:,}, {room:g} GiB are "
            f"there ({free}); try training.activation_checkpointing=true, --parallel fsdp, or a smaller model"
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
    lines.append(
        "not counted: CUDA's context, workspaces of cuBLAS and cuDNN, fragments of the allocator (the reserve)"
    )
    return lines
