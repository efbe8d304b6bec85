"""`cached plan RECIPE --gpus N`: whether a training fits into memory, and in which pieces, without data or a GPU."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_recipe


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="the memory that a recipe takes on each GPU, before it is trained",
        description="Rehearses one training step of the recipe's model on tensors without values, and counts the bytes "
        "that would be alive. Prints whether that fits, and in which pieces. Needs neither data nor a GPU.",
        epilog="examples: cached plan imagenet_pvt_small_grc --gpus 8; cached plan gpt2 --gpus 4 --memory-gib 40 "
        "--parallel fsdp. The exit status is 1 if the recipe does not fit.",
    )
    add_recipe(parser, "e.g. training.batch_size=256 training.precision=bfloat16")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes, a GPU each (default: 1)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="how several GPUs share the work")
    parser.add_argument("--memory-gib", type=float, default=80.0, metavar="GIB", help="memory of a GPU (default: 80)")
    parser.add_argument(
        "--reserve-gib", type=float, default=4.0, metavar="GIB", help="left free for uncounted memory (default: 4)"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row, for rows of any length")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan the recipe and print the bytes of a GPU by kind."""
    from cached_lab.experiments.plan import plan_training
    from cached_lab.tasks.recipes import load_config

    names = ("gpus", "parallel", "memory_gib", "reserve_gib", "length")
    config = load_config(arguments.recipe, arguments.overrides)
    plan = plan_training(config, **{name: getattr(arguments, name) for name in names})
    total = sum(plan.parts.values())
    for part, size in {**plan.parts, "sum": total}.items():
        if size:
            print(f"  {part:<40}{size / 2**20:>12,.1f} MiB")
    machine = f"{arguments.gpus} x {arguments.parallel}"
    print(f"{config.name}: {plan.parameters:,} parameters, {plan.rows:,} rows a step, {machine}")
    room = f"{arguments.memory_gib:g} GiB less {arguments.reserve_gib:g} in reserve"
    if plan.assumed:
        print("assumed: " + ", ".join(f"model.{name}={size}" for name, size in plan.assumed.items()))
    if plan.fits:
        print(f"fits ({room}): micro-batch {plan.micro_batch:,} rows, training.accumulate={plan.accumulate}")
    else:
        print(
            f"does not fit ({room}): {total / 2**30:,.1f} GiB with a micro-batch of {plan.micro_batch:,}; try "
            "training.activation_checkpointing=true, --parallel fsdp, or a smaller model"
        )
    return 0 if plan.fits else 1
