"""State: the tensors that a model carries from one segment to the next, and every operation on them.

`tree.py` has the tree and its operations; `donation.py` permits changes in place; `files.py` writes files and
identifies the weights that made a state.
"""

from .donation import last_use, may_change, seal, used_again
from .files import Packing, Stored, check_weights, fingerprint, load, save
from .tree import (
    KIND,
    State,
    check,
    detach,
    from_tensors,
    join,
    kind_of,
    map_state,
    named_tensors,
    nbytes,
    refuse_narrow,
    reorder,
    repeat,
    replace,
    reset,
    signature,
    summary,
    to,
)

__all__ = [
    "KIND",
    "Packing",
    "State",
    "Stored",
    "check",
    "check_weights",
    "detach",
    "fingerprint",
    "from_tensors",
    "join",
    "kind_of",
    "last_use",
    "load",
    "map_state",
    "may_change",
    "named_tensors",
    "nbytes",
    "refuse_narrow",
    "reorder",
    "repeat",
    "replace",
    "reset",
    "save",
    "seal",
    "signature",
    "summary",
    "to",
    "used_again",
]
