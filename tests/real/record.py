"""All probes on all engines that can run here; what they did goes to `features.json` and into the docs.

python -m tests.real.record
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from tests.real.counting_model import write_counting_model
from tests.real.features import FEATURES, Feature, prompt_embeds, try_feature
from tests.real.fleet import Fleet
from tests.real.kills import kill_in_midstream
from tests.real.loads import read_loads
from tests.real.table import NOTED, TITLES
from tests.real.table import main as write_table
from tools.real_engines import NAMES, RealEngine, UnavailableError, find_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

Cells = dict[str, Mapping[str, str]]
EMBEDS = "`prompt_embeds`"


def find_engines() -> tuple[dict[str, RealEngine], dict[str, str]]:
    """Return the engines of others that can run here, and why the rest cannot."""
    there, missing = {}, {}
    for name in NAMES:
        try:
            there[name] = find_engine(name, build=False)
        except UnavailableError as reason:
            missing[name] = str(reason)
    return there, missing


@contextmanager
def running_fleet(engines: Mapping[str, RealEngine]) -> Iterator[Fleet]:
    """Start these engines and Atoll's own, and wait until all serve."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), write_counting_model(Path(folder, "model")))
        try:
            fleet.start()
            for engine in engines.values():
                fleet.join(engine)
            fleet.join_atoll()
            fleet.wait_until_serving("atoll", *engines)
            yield fleet
        finally:
            fleet.stop()


def probe_node(fleet: Fleet, node: str) -> Cells:
    """Return what one node does, but for what takes its death to see."""
    features = [*FEATURES, Feature(EMBEDS, prompt_embeds(fleet.model))]
    direct = fleet.direct(node) if node in fleet.engine_ports else None
    cells: Cells = {
        feature.name: try_feature(feature, fleet.door(node), direct) for feature in features
    }
    return cells | read_loads(fleet, node)


def kill_nodes(fleet: Fleet, engines: Mapping[str, RealEngine]) -> dict[str, Cells]:
    """Kill engines in mid-stream and return how the others took over; vLLM is last, as it starts slowly."""
    cells: dict[str, Cells] = {}
    heirs = [name for name in ("atoll", "vllm") if name == "atoll" or name in engines]
    if "llamacpp" in engines:
        for heir in heirs:
            cells[heir] = kill_in_midstream(fleet, "llamacpp", heir)
            fleet.join(engines["llamacpp"])
            fleet.wait_until_serving("llamacpp")
        if "vllm" in engines:
            cells["llamacpp"] = kill_in_midstream(fleet, "vllm", "llamacpp")
    return cells


def collect(engines: Mapping[str, RealEngine], missing: Mapping[str, str]) -> dict[str, Any]:
    """Run everything and return it in the shape of `features.json`."""
    with running_fleet(engines) as fleet:
        cells = {node: probe_node(fleet, node) for node in ("atoll", *engines)}
        for heir, found in kill_nodes(fleet, engines).items():
            cells[heir] |= found
    about: dict[str, dict[str, str]] = {"atoll": {"version": atoll.__version__}}
    about |= {name: {"version": engine.version} for name, engine in engines.items()}
    about |= {name: {"not_run": reason} for name, reason in missing.items()}
    rows = dict.fromkeys(name for found in cells.values() for name in found)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "engines": {name: about[name] for name in TITLES},
        "features": {
            row: {node: cells[node][row] for node in TITLES if row in cells.get(node, {})}
            for row in rows
        },
    }


def main() -> int:
    """Write what a run finds."""
    noted = collect(*find_engines())
    NOTED.write_text(json.dumps(noted, indent=1, ensure_ascii=False) + "\n", "utf-8")
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
