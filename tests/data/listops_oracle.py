"""Values of ListOps expressions by a stack machine, which shares nothing with the generator."""

from __future__ import annotations

from cached_lab.tasks.classification.listops.expressions import VOCABULARY


def to_tokens(identifiers: bytes) -> list[str]:
    """Inverse of `tokenize`."""
    return [VOCABULARY[identifier] for identifier in identifiers]


def evaluate(tokens: list[str]) -> int:
    """Value of one complete expression."""
    opened: list[list[str]] = [[]]
    for token in tokens:
        if token in ("[MIN", "[MAX", "[MED", "[SM"):
            opened.append([token])
        elif token == "]":
            operator, *values = opened.pop()
            ordered = sorted(map(int, values))
            middle = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) // 2  # 3.5 rounds down
            results = {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": middle, "[SM": sum(ordered) % 10}
            opened[-1].append(str(results[operator]))
        else:
            assert token in tuple("0123456789")
            opened[-1].append(token)
    ((value,),) = opened
    return int(value)
