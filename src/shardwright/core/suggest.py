"""The nearest right name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, options: Iterable[str], *, limit: int = 3) -> str:
    """The options nearest to ``given`` as the end of a message, or all of them when none is near."""
    known = list(options)
    near = difflib.get_close_matches(given.lower(), known, n=limit, cutoff=0.55)
    if near:
        return "did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "known: " + ", ".join(known)
