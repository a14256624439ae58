"""Run a benchmark and keep its figures, with date and machine, for docs/benchmarks.md.

python -m benchmarks.record sim_speed [options of that benchmark]
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from atoll import __version__

FIGURES = Path(__file__).parent / "results" / "figures.json"


def main() -> int:
    name, *options = sys.argv[1:]
    began_s = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    print(run.stdout, end="")
    kept = json.loads(FIGURES.read_text("utf-8"))
    kept[name] = {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "version": __version__,
        "source": " ".join([f"benchmarks.{name}", *options]),
        "seconds": round(time.monotonic() - began_s),
        "figures": json.loads(run.stdout.splitlines()[-1]),
    }
    FIGURES.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
