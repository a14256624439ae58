"""How long vLLM takes to start on a GPU, by phase: cold, with kept compilations, and by loader of weights.

    python -m benchmarks.gpu_start                       prints what was measured (`results/gpu_start.csv`)
    python -m benchmarks.gpu_start --measure FOLDER      measures, where a GPU and vLLM are: about ten minutes

Measuring writes a model of random weights below FOLDER (16 GB; `--no-weights`: none, and only the loader
`dummy`), starts the command that Atoll would, as Atoll would (`atoll.runtime.endpoints.compile_cache`), and
adds a row for every start: the first compiles, the others find what it left. Before each, the files are taken
out of the page cache. A loader that is not installed is left out, with a line that says so. FOLDER keeps the
logs, with the seconds at which each line came.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

from benchmarks.hardware.gpu_promise_cases import write_model
from benchmarks.report import ROOT, Figure, finish

RESULT = ROOT / "benchmarks" / "results" / "gpu_start.csv"
LOADERS = {
    "dummy": None,
    "auto": None,
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai_model_streamer",
}
"""Load formats, each with the package that it needs beside vLLM's own."""
PHASES = {
    "process": re.compile(r"Starting to load model"),
    "weights": re.compile(r"Model loading took"),
    "compile": re.compile(r"torch\.compile took|Directly load AOT compilation"),
    "profile": re.compile(r"Available KV cache memory|KV cache size"),
    "graphs": re.compile(r"Graph capturing finished"),
    "engine": re.compile(r"init engine \(profile, create kv cache, warmup model\) took"),
    "ready": re.compile(r"$^"),
}
"""What a phase ends with in vLLM's log, in their order; the last ends when the server answers."""
SAID = {
    "said_weights_s": re.compile(r"Loading weights took ([0-9.]+) s"),
    "said_compile_s": re.compile(r"torch\.compile took ([0-9.]+) s"),
    "said_graphs_s": re.compile(r"Graph capturing finished in ([0-9.]+) s"),
    "said_engine_s": re.compile(r"warmup model\) took ([0-9.]+) s"),
}
"""Seconds that vLLM itself says."""
COLUMNS = (
    *("date_utc", "model", "load_format", "start", "total_s"),
    *(f"{phase}_s" for phase in PHASES),
    *SAID,
    *("kept_graphs", "cache_mb", "weights_gb", "disk_gb_per_s", "gpu", "vllm", "torch", "python"),
)
KEPT_GRAPHS = {
    "refused": re.compile(r"Compiling model again due to a load failure"),
    "loaded": re.compile(r"Directly load (AOT compilation|the compiled graph)"),
}
"""What became of graphs that an earlier start compiled."""
_WAIT_S = 480.0
_DROP_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log, and the seconds since the start at which it came."""

    at_s: float
    text: str


def split_phases(lines: Iterable[LogLine], ready_s: float) -> dict[str, float]:
    """Return the seconds of each phase; they add up to `ready_s`.

    A phase begins where the one before it that was seen ended; one that the log does not show takes none.
    """
    ends: dict[str, float] = {}
    for line in lines:
        for phase, pattern in PHASES.items():
            if phase not in ends and pattern.search(line.text):
                ends[phase] = line.at_s
    ends["ready"] = ready_s
    found, last_s = {}, 0.0
    for phase in PHASES:
        # Lines of several processes may come in another order by moments.
        end_s = max(last_s, min(ends.get(phase, last_s), ready_s))
        found[phase], last_s = end_s - last_s, end_s
    return found


def read_said(lines: Iterable[LogLine]) -> dict[str, float]:
    """Return the seconds that the log says, by column."""
    found: dict[str, float] = {}
    for line in lines:
        for name, pattern in SAID.items():
            match = pattern.search(line.text)
            if match is not None:
                found.setdefault(name, float(match[1]))
    return found


def read_kept(lines: Sequence[LogLine]) -> str:
    """Return whether graphs of an earlier start were "loaded" or "refused"; "": there were none."""
    for word, pattern in KEPT_GRAPHS.items():
        if any(pattern.search(line.text) for line in lines):
            return word
    return ""


# Measuring


def write_weights(folder: Path) -> int:
    """Write random weights of a Llama's shapes, a file for every layer; return their bytes."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    wide, inner = config["hidden_size"], config["intermediate_size"]
    head = wide // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    outer = {
        "model.embed_tokens.weight": (config["vocab_size"], wide),
        "model.norm.weight": (wide,),
        "lm_head.weight": (config["vocab_size"], wide),
    }
    layer = {
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (kv, wide),
        "self_attn.v_proj": (kv, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }
    parts: list[dict[str, tuple[int, ...]]] = [outer]
    parts += (
        {f"model.layers.{at}.{name}.weight": shape for name, shape in layer.items()}
        for at in range(config["num_hidden_layers"])
    )
    # The same numbers again and again: what they are does not matter, drawing them all takes minutes.
    noise = (0.02 * torch.randn(1 << 24)).to(torch.bfloat16)

    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        return noise.repeat(-(-size // len(noise)))[:size].reshape(shape).contiguous()

    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        index |= dict.fromkeys(part, name)
        if not (folder / name).exists():
            tensors = {each: fill(shape) for each, shape in part.items()}
            save_file(tensors, folder / name, {"format": "pt"})
    whole = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return sum(path.stat().st_size for path in _weight_files(folder))


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget_pages(folder: Path) -> None:
    """Take the weights out of the page cache, which needs no rights."""
    for path in _weight_files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_disk(folder: Path) -> float:
    """Return the bytes/s of reading the weights one after the other from the disk."""
    forget_pages(folder)
    begun_s, read = time.monotonic(), 0
    for path in _weight_files(folder):
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_DROP_BYTES):
                read += len(chunk)
    return read / (time.monotonic() - begun_s)


def launch_words(model: Path, port: int, kept: Path) -> list[str]:
    """Return the command that Atoll would start, with its kept compilations below `kept`."""
    from atoll.engines.engine import EngineLayout, ServedModel, ServerHost
    from atoll.engines.limits import EngineLaunch
    from atoll.engines.vllm import ENGINE
    from atoll.runtime.endpoints.compile_cache import KeptLaunch

    served = ServedModel(str(model), ("chat",), EngineLaunch(max_model_len=6400))
    layout = EngineLayout("start", 1, 1, 1, (32,))
    command = ENGINE.command(layout, served, ServerHost(str(port), sys.executable))
    launch = KeptLaunch(ENGINE, layout, served, frozenset({"GPU"}))
    return launch.wrap(command.arguments, sys.executable, kept)


def time_start(
    words: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> tuple[float, list[LogLine]]:
    """Start a server, wait until it answers and end it; return the seconds that took, and its log."""
    lines: list[LogLine] = []
    begun_s = time.monotonic()
    server = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if environment is None else {**os.environ, **environment},
        start_new_session=True,
    )

    def read() -> None:
        assert server.stdout is not None
        with server.stdout, log.open("w") as stream:
            for text in server.stdout:
                lines.append(LogLine(time.monotonic() - begun_s, text.rstrip()))
                stream.write(f"{lines[-1].at_s:9.3f} {text}")

    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        while not _answers(port):
            if server.poll() is not None or time.monotonic() - begun_s > _WAIT_S:
                raise SystemExit(f"the server did not come up; its log is {log}")
            time.sleep(0.05)
        ready_s = time.monotonic() - begun_s
    finally:
        server.terminate()
        try:
            server.wait(60.0)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        reader.join(10.0)
    # All of it: what came before it answered may have been read after.
    return ready_s, lines


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measure(folder: Path, model: str, *, weights: bool, repeats: int, out: Path) -> None:
    """Start cold, then with what was kept by every loader, and write a row for each as it comes."""
    home, kept, port = folder / f"model-{model}", folder / "compiled", 18200
    write_model(model, home)
    size = write_weights(home) if weights else 0
    disk = measure_disk(home) if weights else None
    print(f"weights: {size / 1e9:.1f} GB" + (f", disk {disk / 1e9:.2f} GB/s" if disk else ""))
    # So that nothing from before helps a cold start. The home stays: Python may find packages there.
    outside = {name: str(folder / "cache" / name) for name in ("XDG_CACHE_HOME", "CUDA_CACHE_PATH")}
    for path in (kept, folder / "cache"):
        shutil.rmtree(path, ignore_errors=True)
    known = _versions()
    loaders = [name for name in LOADERS if _is_here(name) and (weights or name == "dummy")]
    first = loaders[0]
    starts = [(first, "cold"), *((name, "kept") for name in loaders for _ in range(repeats))]
    for number, (loader, start) in enumerate(starts):
        forget_pages(home)
        words = [*launch_words(home, port + number, kept), "--load-format", loader]
        log = folder / f"start-{number}-{start}-{loader}.log"
        ready_s, lines = time_start(words, port + number, log, outside)
        row: dict[str, object] = {
            "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model,
            "load_format": loader,
            "start": start,
            "total_s": f"{ready_s:.2f}",
            **{f"{name}_s": f"{s:.2f}" for name, s in split_phases(lines, ready_s).items()},
            **read_said(lines),
            "kept_graphs": read_kept(lines),
            "cache_mb": round(_count_bytes(kept) / 1e6),
            "weights_gb": round(size / 1e9, 2),
            "disk_gb_per_s": "" if disk is None else round(disk / 1e9, 2),
            **known,
        }
        _append(out, row)
        print(loader, start, f"{ready_s:.1f} s", flush=True)


def _is_here(loader: str) -> bool:
    package = LOADERS[loader]
    if package is None or importlib.util.find_spec(package) is not None:
        return True
    print(f"{loader} is left out: {package} is not installed")
    return False


def _count_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _versions() -> dict[str, str]:
    from atoll.runtime.endpoints.compile_cache import find_version

    gpu = subprocess.run(
        ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": gpu.stdout.strip().splitlines()[0],
        "vllm": find_version("vllm", ["vllm"]),
        "torch": find_version("torch", ["vllm"]),
        "python": sys.version.split()[0],
    }


def _append(path: Path, row: Mapping[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


# Printing


@dataclass(frozen=True, slots=True)
class Start:
    """A row of the results: how a server started, and the seconds of its phases."""

    model: str
    load_format: str
    kind: str
    ready_s: float
    phases: Mapping[str, float]


def read_starts(path: Path = RESULT) -> Iterator[Start]:
    """Return what was measured, none where nothing was."""
    if not path.is_file():
        return
    with path.open() as stream:
        for row in csv.DictReader(stream):
            # Starts that another benchmark timed have no phases.
            phases = {phase: float(row[f"{phase}_s"] or "nan") for phase in PHASES}
            kind = row["start"]
            yield Start(row["model"], row["load_format"], kind, float(row["total_s"]), phases)


def _mean(starts: Sequence[Start], phase: str | None = None) -> float | None:
    values = [one.ready_s if phase is None else one.phases[phase] for one in starts]
    return round(statistics.fmean(values), 2) if values and not math.isnan(values[0]) else None


def show(starts: Sequence[Start]) -> None:
    """Print the table and the figures."""
    heads = ("model", "loader", "start", "ready", *PHASES)
    print(" ".join(f"{head:>15s}" for head in heads))
    for one in starts:
        seconds = (one.ready_s, *one.phases.values())
        said = (one.model, one.load_format, one.kind, *(f"{s:.1f}" for s in seconds))
        print(" ".join(f"{word:>15s}" for word in said))
    cold = [one for one in starts if one.kind == "cold"]
    # The same loader, so that only what was kept differs.
    like = [one for one in starts if one.kind == "kept" and cold and _alike(one, cold[0])]
    figures = [
        Figure("cold_s", _mean(cold), note="s from the start to the first answer"),
        Figure("kept_s", _mean(like), note="s, with what the first start compiled"),
        Figure("cold_compile_s", _mean(cold, "compile"), note="s"),
        Figure("kept_compile_s", _mean(like, "compile"), note="s"),
    ]
    for loader in LOADERS:
        of = [one for one in starts if one.load_format == loader and one.kind == "kept"]
        figures.append(Figure(f"weights_{loader}_s", _mean(of, "weights"), note="s to load"))
    finish(figures, starts=len(starts))


def _alike(one: Start, other: Start) -> bool:
    return replace(one, kind="", ready_s=0.0, phases={}) == replace(
        other, kind="", ready_s=0.0, phases={}
    )


def main() -> None:
    """Measure where that is asked for, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each kind")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure, with files there")
    parser.add_argument("--model", default="llama-3.1-8b", help="weights are written for Llamas")
    parser.add_argument("--no-weights", action="store_true", help="without writing any")
    parser.add_argument("--out", type=Path, default=RESULT, help="rows are added to this file")
    given = parser.parse_args()
    if given.measure is not None:
        repeats = 1 if given.quick else 2
        folder = given.measure.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        weights = not given.no_weights and given.model.startswith("llama")
        measure(folder, given.model, weights=weights, repeats=repeats, out=given.out)
    show(list(read_starts(given.out)))


if __name__ == "__main__":
    main()
