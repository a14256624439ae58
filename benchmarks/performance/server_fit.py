"""Constants that are fitted on measured servers (`server_rows`), and those with each series left out.

What rows say beyond kernels that were measured one by one. `tools/fit_servers.py` fits them and writes
`benchmarks/results/server_fit.json`; what ships are those fitted on all of them. There are three:

- `sglang_sequence_s`: what a sequence adds to a step of SGLang. Its steps grow with sequences by more than
  kernels do, most where kernels are shortest: 12 ms for 512 sequences of an 8B on eight GPUs.
- `h100_memory`: share of what tables say that products on an H100 reach of its memory's rate in service.
  They say 90 to 99 % of the peak, and decodes of the same model under two engines take 6 to 16 % longer than
  that; on an H200 they do not.
- `experts`: share of the arithmetic of tables that quantised experts reach in service. Tables have tokens
  spread evenly, activations quantised and sorted, and the GPU cool; where they are chosen unevenly the same
  tables say 1.1 to 1.4 times as long for 1,024 to 4,096 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from atoll.engines.limits import HostTime
from atoll.engines.table import profile_engine
from atoll.perf.constants import (
    PRODUCTS,
    ConstantTable,
    OpClass,
    default_constants,
)
from benchmarks.report import ROOT

if TYPE_CHECKING:
    from benchmarks.performance.server_rows import ServerRow

KEPT = ROOT / "benchmarks" / "results" / "server_fit.json"
SERVED_EXPERTS = (OpClass.EXPERTS_FP8, OpClass.EXPERTS_FP4, OpClass.EXPERTS_INT4)
_SLOW_MEMORY = "H100"


@dataclass(frozen=True, slots=True)
class ServedConstants:
    """The constants that are fitted on servers: seconds, and shares of what tables say."""

    sglang_sequence_s: float
    h100_memory: float
    experts: float

    @classmethod
    def shipped(cls) -> ServedConstants:
        """Return those that ship."""
        own = default_constants().gpu(_SLOW_MEMORY)
        return cls(
            profile_engine("sglang").host.sequence_s,
            own.op(OpClass.GEMM).sustained_b,
            own.op(OpClass.EXPERTS_FP8).sustained,
        )

    def table(self) -> ConstantTable:
        """Return the constants that ship with these in their place."""
        return _table(self)

    def host(self, row: ServerRow) -> HostTime | None:
        """Return the host time of a server; None: as it ships."""
        if row.engine != "sglang":
            return None
        usual = profile_engine("sglang").host
        return usual.model_copy(update={"sequence_s": self.sglang_sequence_s})


@lru_cache(maxsize=64)
def _table(served: ServedConstants) -> ConstantTable:
    shipped = default_constants()
    changed = []
    for name in shipped.names():
        own = shipped.gpu(name).ops
        ops = {
            op: replace(c, sustained=served.experts)
            for op, c in own.items()
            if op in SERVED_EXPERTS
        }
        if name == _SLOW_MEMORY:
            ops |= {
                op: replace(own[op], sustained_b=served.h100_memory) for op in PRODUCTS if op in own
            }
        changed.append(replace(shipped.gpu(name), ops={**own, **ops}))
    return shipped.with_gpus(changed)


def read_left_out() -> Mapping[tuple[str, ...], ServedConstants]:
    """Return the constants fitted without each series."""
    kept = json.loads(KEPT.read_text("utf-8"))
    return {tuple(one.pop("series")): ServedConstants(**one) for one in kept["left_out"]}


def write(fitted: ServedConstants, left_out: Mapping[tuple[str, ...], ServedConstants]) -> None:
    """Keep what was fitted on all series and without each."""
    lines = [{"series": list(series), **asdict(own)} for series, own in sorted(left_out.items())]
    kept = {"fitted": asdict(fitted), "left_out": lines}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
