"""Who is told what a long operation does: a terminal, a program, or nobody."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

_LOG = logging.getLogger("atoll")


class Listener:
    """Is told what happens; this one logs it (logger `atoll`, level INFO) and shows no progress."""

    def note(self, text: str) -> None:
        """Take something worth knowing, in a line."""
        _LOG.info(text)

    def working(
        self, text: str, deadline_s: float | None = None
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context whose function is told how far something is; it takes `deadline_s` at most."""
        del text, deadline_s
        return contextlib.nullcontext(lambda _text: None)
