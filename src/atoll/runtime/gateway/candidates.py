"""Models that may serve a request, in the place of the one asked for or as that one."""

from __future__ import annotations

from typing import NamedTuple


class Candidate(NamedTuple):
    """A model that may serve a request, and what it is to the one asked for."""

    model: str
    how: str
    """`exact`, `alias` or `fallback`; of a choice between models also `variant`, which errs no more than the
    one whose turn it is, and `worse`."""
    alias: str = ""
    """A name that nodes must give the model themselves: what one node says binds no other."""
