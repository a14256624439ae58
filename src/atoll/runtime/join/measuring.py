"""Measures the machine that is to join: `atoll profile` in a process of its own, before others hear of it.

A GPU is measured by its operators, whose constants plans use for all models; a machine without one by the
layers of a small model on its cores.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, shorten
from atoll.core.files import load_yaml, read_text_limited
from atoll.fabric.registry.records import Hardware

MODEL = "smollm2-135m"
"""What cores are measured with: Atoll has its weights by itself."""
_LIMIT_S = 1800.0
_MAX_THREADS = 64
_DIGITS = 4


async def measure(hardware: Hardware) -> dict[str, Any]:
    """Return what was measured (`atoll.fabric.registry.measured`); AtollError says why nothing was."""
    with tempfile.TemporaryDirectory(prefix="atoll-measure-") as folder:
        out = Path(folder) / ("found.yaml" if hardware.gpus else "found.json")
        await _run(list_words(hardware, out))
        return read_found(out)


def list_words(hardware: Hardware, out: Path) -> list[str]:
    """Return the command that measures, and writes what it finds to `out`."""
    words = [sys.executable, "-m", "atoll", "profile", "--json", "--out", str(out)]
    if hardware.gpus:
        return [*words, "--operators"]
    threads = max(1, min(hardware.cpus or 1, _MAX_THREADS))
    return [*words, "--name", MODEL, "--threads", str(threads)]


def read_found(path: Path) -> dict[str, Any]:
    """Return a measurement from the file that `atoll profile` wrote."""
    if path.suffix == ".yaml":
        data = load_yaml(path)
        gpus = data.get("gpus") if isinstance(data, dict) else None
        if not isinstance(gpus, dict) or len(gpus) != 1:
            raise AtollError("nothing was measured of this machine's GPU")
        ((gpu, entry),) = gpus.items()
        return {"kind": "operators", "gpu": gpu, "operators": _round(entry["operators"])}
    ((model, kinds),) = json.loads(read_text_limited(path)).items()
    (profile,) = kinds.values()
    return {"kind": "layers", "model": model, "profile": _round(profile)}


async def _run(words: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError as error:
        raise AtollError(f"measuring took more than {_LIMIT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise AtollError(f"measuring failed: {shorten(' '.join(last), 200)}")


def _round(value: Any) -> Any:
    """Return plain data with numbers of a few digits: a label is short, and no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    return [_round(each) for each in value] if isinstance(value, list) else value
