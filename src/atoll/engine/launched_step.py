"""A step that the device was given and whose tokens nobody has read yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.engine.batcher import BatchUnit
from atoll.engine.device_copy import HostCopy


@dataclass(slots=True)
class LaunchedStep:
    """The `units` of a batch, and the `tokens` on their way for those of them that are `sampled`.

    `began_s` is when the host began to prepare it, `done_s` when it was first seen to be done.
    """

    units: list[BatchUnit]
    sampled: list[BatchUnit]
    tokens: HostCopy
    began_s: float
    done_s: float = math.inf

    def look(self, now_s: float) -> None:
        """See whether it is done."""
        if math.isinf(self.done_s) and self.tokens.is_here:
            self.done_s = now_s
