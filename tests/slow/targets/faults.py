"""Ways in which targets answer wrongly, and what stages have in common."""

from __future__ import annotations

FAULTS = (
    "time-out",
    "late",
    "silent",
    "errors",
    "no rows",
    "partial",
    "cut",
    "duplicate",
    "reordered",
    "denied",
    "quota",
    "half-started",
)
"""Ways to answer wrongly.

`late`: what was asked is done, and the answer comes to nobody. `silent`: an answer without a word, with exit
code 0. `errors`: an empty list with errors beside it. `no rows`, `partial`: all or half of the rows are
missing. `cut`: half of the text. `denied`, `quota`: refused, all or what is new. `half-started`: the first
order is carried out, wholly or in part, and from then on nobody answers.
"""
BEGAN_S = 1_700_000_000.0
SECRET = "ATOLL_FABRIC"  # the name of a variable
KIND_COUNT = 4
