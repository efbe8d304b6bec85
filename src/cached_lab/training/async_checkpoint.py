"""Saves one after another: at once, or by a thread, while training goes on.

In the background a save costs training a copy in memory of what is saved (on the CPU), and what the processor gives the
thread. All else is as it is at once: the same files, a folder that appears by one rename when all of it is on disk, and
earlier checkpoints that stay as they were whatever becomes of it. There is one save at a time: the next one, and the
end of training, wait for the last, and raise the error that it met. What the processes say to each other about a save
goes through a group of its own, since training uses theirs at the same time.
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


class Saves:
    """Carries out the saves of one trainer.

    Args:
        background: whether a thread does.
        world: of the processes that write together; every one of them must make it. One alone where others only wait.

    Attributes:
        background: as given.
    """

    def __init__(self, background: bool, world: World) -> None:
        self.background = background
        self._world = world
        self._thread = ThreadPoolExecutor(1, "save") if background else None
        self._pending: Future[object] | None = None
        if background and world.size > 1:
            group = dist.new_group(backend="gloo")  # of tensors on the CPU, whatever the device
            self._world = dataclasses.replace(world, device=torch.device("cpu"), group=group)

    def kept(self, tree: T) -> T:
        """A tree of tensors as it is now: a copy where it is written later."""
        return _copied(tree) if self.background else tree

    def carry_out(self, write: Callable[[World], object]) -> None:
        """Begin a save when the last one is on disk; `write` is called with the processes that take part.

        Raises:
            Exception: of the last save, or of this one where it is carried out at once.
        """
        self.wait()
        if self._thread is None:
            write(self._world)
        else:
            self._pending = self._thread.submit(write, self._world)

    def wait(self) -> None:
        """Return when the last save is on disk, or raise the error that it met, once."""
        if self._pending is not None:
            error = self._pending.exception()  # a signal may end this wait, and another one begins
            self._pending = None
            if error is not None:
                raise error

    @contextlib.contextmanager
    def finished(self, say: Callable[[str], object]) -> Iterator[None]:
        """A `with` block that ends when the last save is on disk. Where another error ends it, `say` is told of that
        of the save.

        Raises:
            Exception: of the last save.
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
