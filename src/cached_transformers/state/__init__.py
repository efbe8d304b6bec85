"""State: what a model carries from one segment to the next, and every operation on it.

`tree.py` is what it is and what can be done with it; `last_use.py` says when it may be changed in place; `files.py` how
it is written, `packing.py` in fewer bytes, and `fingerprint.py` tells the weights that made it.
"""

from .donation import last_use, may_change, seal, used_again
from .files import Stored, load, save
from .fingerprint import fingerprint
from .tree import (
    State,
    check,
    detach,
    from_tensors,
    join,
    map_state,
    named_tensors,
    nbytes,
    refuse_narrow,
    reorder,
    repeat,
    reset,
    signature,
    summary,
    to,
)

__all__ = [
    "State",
    "Stored",
    "check",
    "detach",
    "fingerprint",
    "from_tensors",
    "join",
    "last_use",
    "load",
    "map_state",
    "may_change",
    "named_tensors",
    "nbytes",
    "refuse_narrow",
    "reorder",
    "repeat",
    "reset",
    "save",
    "seal",
    "signature",
    "summary",
    "to",
    "used_again",
]
