"""State: what a model carries from one segment to the next, and every operation on it.

`tree.py` is what it is and what can be done with it; `files.py` how it is written, `packing.py` in fewer bytes, and
`fingerprint.py` tells the weights that made it.
"""

from .files import Stored, load, save
from .fingerprint import fingerprint
from .tree import (
    State,
    check,
    detach,
    from_tensors,
    map_state,
    named_tensors,
    nbytes,
    reorder,
    repeat,
    reset,
    seal,
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
    "load",
    "map_state",
    "named_tensors",
    "nbytes",
    "reorder",
    "repeat",
    "reset",
    "save",
    "seal",
    "signature",
    "summary",
    "to",
]
