"""`cached plan`: the memory that a recipe takes on each GPU, before it is trained.

Rehearses one training step of the recipe's model on tensors without values, and counts the bytes that would be alive.
Prints whether that fits, and in which pieces. Needs neither data nor a GPU. The exit status is 1 if the recipe does not
fit.
"""

from __future__ import annotations

import argparse

from .arguments import recipe_arguments

ARGUMENTS = (
    *recipe_arguments("e.g. training.batch_size=256 training.precision=bfloat16"),
    ("--gpus N", 1, "processes, a GPU each"),
    ("--parallel", ("ddp", "fsdp"), "how several GPUs share the work (default: ddp)"),
    ("--memory-gib GIB", 80.0, "memory of a GPU"),
    ("--reserve-gib GIB", 4.0, "left free for uncounted memory"),
    ("--length N", int, "tokens of a row, for rows of any length"),
)


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
