"""Checkpoint writer, synchronous or in a background thread, with at most one save at a time.

A background save costs a copy of the saved tensors in CPU memory, and writes the same files in the same order. The next
save and the end of training wait for it and raise its error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import World

T = TypeVar("T")


class CheckpointWriter:
    """Writer for the saves of one trainer.

    Args:
        background: write in a thread.
        world: processes that write together, and all create a writer; a world of one if only one writes.
    """

    def __init__(self, background: bool, world: World) -> None:
        self.background, self._world = background, world
        self._thread = ThreadPoolExecutor(1, "save") if background else None
        self._pending: Future[object] | None = None
        if background and world.size > 1:
            group = dist.new_group(backend="gloo")  # training uses the default group at the same time
            self._world = dataclasses.replace(world, device=torch.device("cpu"), group=group)

    def snapshot(self, tree: T) -> T:
        """Return the tree, with its tensors copied to the CPU if it is written later."""
        return _copied(tree) if self.background else tree

    def submit(self, write: Callable[[World], object]) -> None:
        """Call `write` with the processes that write, once the previous save is on disk.

        Raises:
            Exception: of the previous save, or of this one if it is synchronous.
        """
        self.wait()
        if self._thread is None:
            write(self._world)
        else:
            self._pending = self._thread.submit(write, self._world)

    def wait(self) -> None:
        """Wait for the pending save and raise its error."""
        if self._pending is not None:
            error = self._pending.exception()  # a signal may interrupt this wait, and a second wait follows
            self._pending = None
            if error is not None:
                raise error

    @contextlib.contextmanager
    def finished(self, say: Callable[[str], object]) -> Iterator[None]:
        """Wait for the pending save at the end of a `with` block; if the block fails, report the error of the save.

        Raises:
            Exception: of the pending save.
        """
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as error:
                say(f"the last save failed, too: {error}")
            raise
        self.wait()


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(value) for value in tree)
    return tree
