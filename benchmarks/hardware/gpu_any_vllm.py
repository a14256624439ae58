"""The model of `gpu_any` in vLLM: one server, one that takes a request at a time, and encoder and llm apart.

    python -m benchmarks.gpu_any_vllm serve OUT [--tiny] [--seconds 30] [--ways monolith serial apart]
    python -m benchmarks.gpu_any_vllm                                  (anywhere: the table and the figures)

Where the GPU is, `serve` needs vLLM for this Python; no weights and no hub: `--load-format dummy`. Requests,
classes and arrivals are those of `gpu_any`. For each way it

1. starts the servers (`apart`: vLLM's own disaggregated encoder, which hands embeddings over as files);
2. asks one request at a time (`alone`);
3. has eight texts answered at length, with nothing else to do (`calm`) and while pictures come (`held`);
4. finds what it carries with `CLIENTS` clients (`carried`), and then sends arrivals in an open loop, at 70 %
   of what the monolith carries or of `--base` (`load`).

A plugin (`vllm_times`) notes every step of the engine, every encoder's run in one, and every picture that is
read. `gpu_any_vllm.json` has what came of it, `gpu_any_vllm.csv` a row for every request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from atoll.runtime.http.http_client import FetchError, request
from benchmarks.any_to_any.task_clients import AskError, ClientOrder, HeardReply, ask, chat_order
from benchmarks.hardware import vllm_times
from benchmarks.hardware.gpu_any import (
    CARRIED,
    CLIENTS,
    FULL,
    LOAD,
    PICTURE,
    PICTURE_SHARE,
    RESULTS,
    SERVICE,
    TEXT,
    TINY,
    Asked,
    Asker,
    Seen,
    Shape,
    draw_arrivals,
    draw_mix,
    draw_png,
    draw_words,
    find_gpu,
    make_config,
    pixel_options,
    summarise,
    write_words,
)
from benchmarks.report import Figure, finish, options

if TYPE_CHECKING:
    from atoll.sim.tasks.task_fleet import TaskFleet

WAYS = ("monolith", "serial", "apart")
Host: TypeAlias = Literal["beside", "on", ""]
HOSTS: tuple[Host, ...] = ("beside", "on", "")
_TEXT_TOKENS = 200.0
_PICTURE_TOKENS = 20.0 + round(FULL.picture[0] / 28) * round(FULL.picture[1] / 28)
_KV_TOKENS = 374_000
"""Tokens of the KV cache of `--kv-cache-memory-bytes 20G`."""
SEQUENCES = 64
"""Requests that a server works on at once, where not one."""
_SMALL = replace(
    TINY,
    text=dict(TINY.text) | {"hidden_size": 128, "mrope_section": [8, 4, 4]},
    vision=dict(TINY.vision) | {"hidden_size": 64, "num_heads": 2, "out_hidden_size": 128},
    dtype="bfloat16",
)
_ALONE = 6
_LONG = 8
_HELD_TOKENS = 400
_HELD_PICTURES = 6
_READY_S = 240.0
_TOKENS_A_STEP = 8192
_IN_A_STEP = int(_TOKENS_A_STEP / _PICTURE_TOKENS)
"""Pictures that fit into a step."""
_CUTS = {
    "start": ("--enforce-eager",),
    "graphs": (
        "--compilation-config",
        json.dumps(
            {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, *range(8, SEQUENCES + 1, 8)],
            }
        ),
    ),
}
_ENCODER_ATTENTION = ((), ("--mm-encoder-attn-backend", "TORCH_SDPA"))
"""What servers are told of the encoder's attention, in turn until one answers."""


def write_model(shape: Shape, folder: Path) -> None:
    """Write what vLLM reads of a model besides its weights."""
    import transformers

    folder.mkdir()
    config = make_config(shape)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = shape.dtype
    config.save_pretrained(folder)
    write_words(shape, folder)
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**pixel_options(shape)),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=transformers.Qwen2VLVideoProcessor(**pixel_options(shape)),
    )
    processor.save_pretrained(folder)


def commands(
    shape: Shape, way: str, model: Path, folder: Path, more: Sequence[str]
) -> dict[str, list[str]]:
    """Return the commands of a way's servers by name; the last is asked for answers."""
    on_gpu = shape.device != "cpu"

    def serve(port: int, sequences: int, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVICE),
            *("--load-format", "dummy", "--dtype", shape.dtype, "--max-model-len", "4096"),
            *("--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(_TOKENS_A_STEP)),
            *("--limit-mm-per-prompt", '{"image": 1, "video": 0}', "--skip-mm-profiling"),
            *("--kv-cache-memory-bytes", "20G" if on_gpu else "1G"),
            # Two servers share the GPU; this is only looked at as they start.
            *(("--gpu-memory-utilization", "0.4") if on_gpu else ()),
            *("--disable-uvicorn-access-log", *arguments, *more),
        ]

    def hands_over(role: str) -> tuple[str, str]:
        about = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(folder / "embeddings")},
        }
        return "--ec-transfer-config", json.dumps(about)

    answers = _CUTS["graphs" if on_gpu else "start"]
    if way == "monolith":
        return {"server": serve(18100, SEQUENCES, *answers)}
    if way == "serial":
        return {"server": serve(18110, 1, *answers)}
    return {
        "encoder": serve(
            18120,
            SEQUENCES,
            *_CUTS["start"],
            "--no-enable-prefix-caching",
            *hands_over("ec_producer"),
        ),
        "llm": serve(18121, SEQUENCES, *answers, *hands_over("ec_consumer")),
    }


class Servers:
    """The servers of a way, started one after the other."""

    def __init__(self, lines: Mapping[str, Sequence[str]], folder: Path) -> None:
        self.lines = lines
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> dict[str, str]:
        """Their addresses, by name."""
        return {
            name: f"http://127.0.0.1:{line[line.index('--port') + 1]}"
            for name, line in self.lines.items()
        }

    async def start(self) -> None:
        """Start them; `AskError` if one ends or does not come to answer."""
        times, plugin = self._folder / "times", self._folder / "plugin"
        times.mkdir(parents=True, exist_ok=True)
        if not plugin.is_dir():
            vllm_times.write_plugin(plugin)
        path = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": path, vllm_times.FOLDER_VARIABLE: str(times)}
        (self._folder / "embeddings").mkdir(exist_ok=True)
        for name, line in self.lines.items():
            log = (self._folder / f"{name}.log").open("wb")
            self._running[name] = subprocess.Popen(
                line,
                stdout=log,
                stderr=log,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **more},
                start_new_session=True,
            )
            await self._await(name)

    async def _await(self, name: str) -> None:
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s:
            if self._running[name].poll() is not None:
                raise AskError(f"{name} ended: {self.said(name)}")
            with contextlib.suppress(FetchError):
                if (await request(f"{self.urls[name]}/health")).status == 200:
                    return
            await asyncio.sleep(0.5)
        raise AskError(f"{name} is not ready after {_READY_S:g} s: {self.said(name)}")

    def said(self, name: str) -> str:
        """Return how a server's log ends."""
        return (self._folder / f"{name}.log").read_text("utf-8", "replace")[-6000:]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process of the servers so far, by what it is."""
        tick = os.sysconf("SC_CLK_TCK")
        groups = {process.pid: name for name, process in self._running.items()}
        found: dict[str, float] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                # Each server is a session of its own; the first process of it answers HTTP.
                name = groups.get(int(fields[3]))
                if name is not None:
                    kind = "api" if int(path.parent.name) in groups else "engine"
                    key = f"{name}_{kind}"
                    spent_s = (int(fields[11]) + int(fields[12])) / tick
                    found[key] = found.get(key, 0.0) + spent_s
        return found

    def stop(self) -> None:
        """End them and whatever they started."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class VllmAsker(Asker):
    """Clients of vLLM; where the encoder is apart it sees a picture before the llm is asked."""

    def __init__(self, shape: Shape, urls: Mapping[str, str], way: str) -> None:
        super().__init__(shape, list(urls.values())[-1], way)
        self._encoder = urls.get("encoder")
        self.replies: dict[str, HeardReply] = {}

    async def send(self, order: ClientOrder, reply: HeardReply) -> None:
        """Ask for an answer of exactly so many tokens."""
        self.replies[order.name] = reply
        body = dict(order.body or {}) | {"ignore_eos": True}
        content = body["messages"][0]["content"]
        begun_s = time.monotonic()
        if self._encoder is not None and not isinstance(content, str):
            seen = [part for part in content if part["type"] == "image_url"]
            look = chat_order(order.name, SERVICE, "encode", seen, 1).body or {}
            look |= {"stream": False}
            await ask(self._encoder, ClientOrder(order.name, "encode", order.path, look), reply)
        looked_s = time.monotonic() - begun_s
        await ask(self.url, replace(order, body=body), reply)
        # Counted from when the encoder was asked.
        reply.first_s = None if reply.first_s is None else reply.first_s + looked_s
        reply.took_s += looked_s

    def draw(self, asked: Iterable[tuple[int, str]]) -> None:
        """Draw pictures ahead, so that clients do not wait for them."""
        for number, klass in asked:
            if klass == PICTURE:
                self.pictures[number] = draw_png(self._shape, number)

    async def hold(self, shape: Shape, pictures: int, seed: int) -> dict[str, float]:
        """Have texts answered at length, and pictures come meanwhile; returns what the texts felt."""
        numbers = range(1000 * seed, 1000 * seed + _LONG)
        replies = [HeardReply() for _ in numbers]

        async def long(number: int, reply: HeardReply) -> None:
            words, tokens = draw_words(shape, number, 50), _HELD_TOKENS
            await self.send(chat_order(f"long {number}", SERVICE, TEXT, words, tokens), reply)

        texts = [asyncio.create_task(long(*each)) for each in zip(numbers, replies, strict=True)]
        while any(reply.pieces < 8 for reply in replies) and not all(each.done() for each in texts):
            await asyncio.sleep(0.01)
        for at in range(pictures):
            await self.ask("held", 1000 * seed + 500 + at, PICTURE, 0.0)
        await asyncio.gather(*texts)
        return {
            "tpot_ms": float(np.mean([_tpot_ms(reply) for reply in replies])),
            "gap_ms": 1e3 * max(reply.gap_s for reply in replies),
        }


def _tpot_ms(reply: HeardReply) -> float:
    return 1e3 * (reply.took_s - (reply.first_s or 0.0)) / max(reply.pieces - 1, 1)


@contextlib.asynccontextmanager
async def _brought_up(
    shape: Shape, way: str, model: Path, folder: Path, note: dict[str, Any]
) -> AsyncGenerator[Servers, None]:
    """Yield servers that have answered a request of each class."""
    for more in _ENCODER_ATTENTION:
        begun_s = time.monotonic()
        servers = Servers(commands(shape, way, model, folder, more), folder)
        try:
            try:
                await servers.start()
                asker = VllmAsker(shape, servers.urls, way)
                for klass in (TEXT, PICTURE):
                    await asker.ask("first", len(asker.rows), klass, 0.0)
                wrong = [row.error for row in asker.rows if row.error]
                if wrong:
                    raise AskError(f"{wrong}: {[servers.said(name) for name in servers.lines]}")
            except AskError as error:
                print(way, more, error, flush=True)
                note.setdefault("failed", []).append(str(error)[-1500:])
                continue
            note["ready_s"] = round(time.monotonic() - begun_s, 1)
            note["more"] = list(more)
            yield servers
            return
        finally:
            servers.stop()
    raise AskError(f"{way} cannot be served")


async def _serve(
    shape: Shape,
    way: str,
    model: Path,
    folder: Path,
    seconds: float,
    base_per_s: float | None,
    note: dict[str, Any],
) -> list[Asked]:
    """Bring a way up and do all that is measured with it; `base_per_s` is what the load is a share of."""
    stages: dict[str, tuple[float, float]] = {}
    note["stages"] = stages
    async with _brought_up(shape, way, model, folder, note) as servers:
        asker = VllmAsker(shape, servers.urls, way)

        @contextlib.contextmanager
        def stage(name: str) -> Any:
            begun_s, cpu_s = time.time(), servers.cpu_s()
            yield
            stages[name] = begun_s, time.time()
            spent = {key: round(value - cpu_s[key], 2) for key, value in servers.cpu_s().items()}
            note.setdefault("cpu_s", {})[name] = spent
            print(f"  {way} {name}: {time.time() - begun_s:.1f} s {note.get(name, '')}", flush=True)

        count = CARRIED // 3 if way == "serial" else 2 * CARRIED
        for seed, number in ((1, CLIENTS), (2, count)):
            asker.draw(draw_mix(number, seed))
        with stage("warm-up"):
            await asker.saturate("warm-up", CLIENTS, 1)
        with stage("alone"):
            tpot: list[float] = []
            for at in range(2 * _ALONE):
                await asker.ask("alone", 7000 + at, (TEXT, PICTURE)[at % 2], 0.0)
                tpot.append(_tpot_ms(asker.replies[str(7000 + at)]))
            note["alone_tpot_ms"] = round(float(np.mean(tpot)), 3)
        if way != "serial":
            for name, pictures in (("calm", 0), ("held", _HELD_PICTURES)):
                with stage(name):
                    note[name] = await asker.hold(shape, pictures, 8 if name == "calm" else 9)
        with stage("carried"):
            note["carried_per_s"] = round(await asker.saturate("carried", count, 2), 4)
        rate = LOAD * (note["carried_per_s"] if base_per_s is None else base_per_s)
        if way != "serial":
            note["load_per_s"] = round(rate, 4)
            arrivals = draw_arrivals(rate, seconds)
            asker.draw((number, klass) for _, number, klass in arrivals)
            with stage("load"):
                await asker.load(arrivals)
        print(way, note["carried_per_s"], summarise(asker.rows), flush=True)
    note["times"] = digest(read_times(folder / "times"), stages)
    return asker.rows


def read_times(folder: Path) -> list[dict[str, Any]]:
    """Return what all processes of a way noted, in order of time; each step with how long it took."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        mine = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in mine if line["what"] == "step"]
        for line, after in itertools.pairwise(steps):
            line["took_s"] = after["at_s"] - line["at_s"]
        lines += [line for line in mine if "took_s" in line]
    return sorted(lines, key=lambda line: float(line["at_s"]))


def digest(
    lines: Sequence[Mapping[str, Any]], stages: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return what steps and pictures took in each stage, in milliseconds: count, mean, median and p95."""
    found: dict[str, Any] = {}
    for name, (from_s, to_s) in stages.items():
        groups: dict[str, list[float]] = {}
        for line in lines:
            if not from_s <= line["at_s"] < to_s:
                continue
            took_ms = 1e3 * line["took_s"]
            if line["what"] != "step":
                groups.setdefault(line["what"], []).append(took_ms)
                groups.setdefault(f"{line['what']} cpu", []).append(1e3 * line["cpu_s"])
            elif line["items"]:
                groups.setdefault(f"step of {line['items']} pictures", []).append(took_ms)
                key = f"encoder of {line['items']}"
                groups.setdefault(key, []).append(1e3 * line["encoder_s"])
                if line["requests"] > line["items"]:
                    # Others were answered in the same step, and waited.
                    groups.setdefault("step that holds others up", []).append(took_ms)
            elif line["tokens"] > line["requests"]:
                groups.setdefault("step of prompts", []).append(took_ms)
            elif line["tokens"]:
                # After the last of a busy time the GPU rests: that is no step.
                size = 2 ** max(line["requests"] - 1, 0).bit_length()
                groups.setdefault(f"step of tokens, up to {size}", []).append(took_ms)
        found[name] = {
            key: {
                "count": len(each),
                "mean": round(float(np.mean(each)), 3),
                "median": round(float(np.median(each)), 3),
                "p95": round(float(np.percentile(each, 95)), 3),
                "sum_s": round(1e-3 * float(np.sum(each)), 3),
            }
            for key, each in sorted(groups.items())
        }
    return found


def serve(
    out: Path, *, tiny: bool, seconds: float, ways: Sequence[str], base_per_s: float | None
) -> None:
    """Do all that needs the GPU, and write what came of it after each way."""
    shape = _SMALL if tiny else FULL
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu_any_vllm.json"
    note: dict[str, Any] = {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": shape.name,
        "gpu": find_gpu(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("vllm", "torch", "transformers")},
        "ways": {},
    }
    rows: list[Asked] = []
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 * 2**30
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as temporary:
        folder = Path(temporary)
        model = folder / "model"
        write_model(shape, model)
        for way in ways:
            about: dict[str, Any] = {}
            note["ways"][way] = about
            (folder / way).mkdir()
            try:
                rows += asyncio.run(
                    _serve(shape, way, model, folder / way, seconds, base_per_s, about)
                )
                base_per_s = base_per_s or about["carried_per_s"]
            except (AskError, FetchError) as error:
                # The other ways may still be served.
                about["error"] = str(error)[-1500:]
                print(way, error, flush=True)
            for log in (folder / way).glob("*.log"):
                tail = log.read_text("utf-8", "replace")[-100_000:]
                (out / f"{way}-{log.name}").write_text(tail)
            path.write_text(json.dumps(note, indent=1) + "\n")
            with path.with_suffix(".csv").open("w", newline="") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(Asked._fields)
                writer.writerows(rows)


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "none"


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of the parts of one server, each with little or nothing beside it.

    prepare_s: of a picture, in the one thread of the process that answers HTTP. encoder_s: of a picture on
    the GPU, in a step. prefill: tokens of prompts in a step, and what it takes without the encoder. decode:
    sequences, and seconds of a step that makes a token of each. hidden_s: what a step with prompts and tokens
    takes less than one with prompts and one with tokens. around_s: by class, what a first token takes more
    than all that, which nobody waits for but the request itself: HTTP, reading a picture, scheduling.
    """

    prepare_s: float
    encoder_s: float
    prefill: tuple[tuple[float, float], ...]
    decode: tuple[tuple[float, float], ...]
    hidden_s: float
    around_s: Mapping[str, float]


def read_parts(
    times: Mapping[str, Mapping[str, Mapping[str, float]]], rows: Sequence[Asked]
) -> PartTimes:
    """Return what parts take, from the stages that ask for little at a time."""

    def mean_s(stage: str, key: str) -> float:
        return 1e-3 * times[stage][key]["mean"]

    prepare_s, encoder_s = (mean_s("alone", key) for key in ("prepare", "encoder of 1"))
    text_s = mean_s("alone", "step of prompts")
    picture_s = mean_s("alone", "step of 1 pictures") - encoder_s
    two_s = mean_s("warm-up", "step of 2 pictures") - mean_s("warm-up", "encoder of 2")
    one, eight = (
        mean_s("alone", "step of tokens, up to 1"),
        mean_s("calm", "step of tokens, up to 8"),
    )
    both = mean_s("held", "step of 1 pictures") - mean_s("held", "encoder of 1")
    alone = {TEXT: text_s, PICTURE: prepare_s + encoder_s + picture_s}
    firsts = {
        klass: [
            1e-3 * float(row.ttft_ms) for row in rows if (row.run, row.klass) == ("alone", klass)
        ]
        for klass in alone
    }
    return PartTimes(
        prepare_s,
        encoder_s,
        ((_TEXT_TOKENS, text_s), (_PICTURE_TOKENS, picture_s), (2 * _PICTURE_TOKENS, two_s)),
        ((1.0, one), (float(_LONG), eight)),
        # It cannot be more than the shortest step.
        min(max(picture_s + eight - both, 0.0), one),
        {klass: float(np.mean(firsts[klass])) - each for klass, each in alone.items()},
    )


def make_fleet(parts: PartTimes, sequences: int, host: Host) -> TaskFleet:
    """Return one server as it is simulated: its encoder works in its steps, between those of tokens.

    `host` is where pictures are prepared: "beside" the GPU, one after the other, or "on" it, as if its time
    were the GPU's, or nowhere ("").
    """
    from atoll.sim.tasks.task_fleet import (
        Amount,
        BatchPart,
        ClassSpec,
        ExecutorSpec,
        PartEdge,
        PartModel,
        PartNeed,
        PathSpec,
        StepSpec,
        StepTable,
        TaskFleet,
        TokenPart,
    )

    prepare_s = parts.prepare_s if host else 1e-9
    gpu: dict[str, PartModel] = {
        # So many fit into a step.
        "vision": BatchPart({PICTURE: parts.encoder_s}, max_batch=_IN_A_STEP),
        "llm": TokenPart(
            StepTable(parts.prefill, parts.decode, shared_s=parts.hidden_s),
            _KV_TOKENS,
            sequences,
            _TOKENS_A_STEP,
        ),
    }
    prepare = BatchPart({PICTURE: prepare_s})
    if host == "on":
        executors = [ExecutorSpec("gpu", "box", SERVICE, {"prepare": prepare, **gpu})]
    else:
        executors = [
            ExecutorSpec("api", "box", SERVICE, {"prepare": prepare}),
            ExecutorSpec("gpu", "box", SERVICE, gpu),
        ]
    needs = {"llm": PartNeed(prompt=Amount(_TEXT_TOKENS), answer=Amount(float(FULL.answer)))}
    pictured = {
        "prepare": PartNeed(),
        "vision": PartNeed(),
        "llm": PartNeed(prompt=Amount(_PICTURE_TOKENS), answer=Amount(float(FULL.answer))),
    }
    edges = (PartEdge("prepare", "vision"), PartEdge("vision", "llm"))
    classes = (
        ClassSpec(SERVICE, TEXT, 1.0 - PICTURE_SHARE, needs),
        ClassSpec(SERVICE, PICTURE, PICTURE_SHARE, pictured, edges),
    )
    paths = tuple(
        PathSpec(
            SERVICE,
            klass.name,
            1.0,
            tuple(
                StepSpec(used, ((executor.name, 1.0),))
                for executor in executors
                if (used := tuple(part for part in executor.parts if part in klass.needs))
            ),
        )
        for klass in classes
    )
    return TaskFleet(tuple(executors), classes, paths)


def simulate(parts: PartTimes, load: Sequence[Asked], host: Host = "beside") -> Seen:
    """Return what the monolith does in simulation: with clients that wait, and under the load."""
    from atoll.sim.tasks.simulate_tasks import simulate_tasks
    from atoll.sim.tasks.task_demand import Arrivals, Demand

    fleet = make_fleet(parts, CLIENTS, host)
    carried = simulate_tasks(fleet, requests=600, arrivals=Arrivals(at_once=True), seed=37)
    order = sorted(load, key=lambda row: float(row.arrival_s))
    names = [klass.name for klass in fleet.classes]
    ones = np.ones(len(order))
    demand = Demand(
        np.array([float(row.arrival_s) for row in order]),
        np.array([names.index(row.klass) for row in order]),
        ones,
        ones,
    )
    under = simulate_tasks(make_fleet(parts, SEQUENCES, host), demand=demand, warmup=0.0).columns
    around_s = np.array([parts.around_s[row.klass] for row in order])
    return Seen(
        carried.by_makespan_per_s,
        1e3 * (under.ttft_s + around_s),
        1e3 * (under.e2e_s + around_s),
    )


def read(results: Path = RESULTS) -> tuple[dict[str, Any], list[Asked]]:
    """Return the notes and all requests of the kept run."""
    path = results / "gpu_any_vllm.json"
    with path.with_suffix(".csv").open() as stream:
        return json.loads(path.read_text()), [Asked(**row) for row in csv.DictReader(stream)]


def _show(way: str, about: Mapping[str, Any], rows: Sequence[Asked]) -> None:
    """Print what clients saw and where the time went, for one way."""
    print(f"{way}: {about['carried_per_s']:.2f} requests/s")
    for run in ("alone", "load"):
        for klass in (TEXT, PICTURE):
            of = [row for row in rows if (row.way, row.run, row.klass) == (way, run, klass)]
            if good := [row for row in of if not row.error]:
                ttft, whole = (
                    np.array([float(getattr(row, name)) for row in good])
                    for name in ("ttft_ms", "e2e_ms")
                )
                print(
                    f"  {run:8s}{klass:12s}{len(good):4d}  TTFT mean {np.mean(ttft):6.1f} p95"
                    f" {np.percentile(ttft, 95):6.1f}  whole p95 {np.percentile(whole, 95):6.1f} ms"
                )
    for stage in ("alone", "calm", "held", "load"):
        for key, each in about["times"].get(stage, {}).items():
            print(
                f"  {stage:8s}{key:28s}{each['count']:6d}  mean {each['mean']:7.2f}"
                f"  p95 {each['p95']:7.2f} ms"
            )


def figures(results: Path = RESULTS) -> list[Figure]:
    """Print what each way did, and return the figures."""
    note, rows = read(results)
    print(f"{note['model']}; {note['gpu']}; {note['versions']}")
    ways = note["ways"]
    for way, about in ways.items():
        _show(way, about, rows)
    load = [row for row in rows if (row.way, row.run) == ("monolith", "load")]
    served = Seen(
        ways["monolith"]["carried_per_s"],
        *(np.array([float(getattr(row, name)) for row in load]) for name in ("ttft_ms", "e2e_ms")),
    )
    times = ways["monolith"]["times"]
    parts = read_parts(times, [row for row in rows if row.way == "monolith"])
    print(f"{parts}\n{'monolith':24s}{'carried/s':>10s}{'TTFT p95 ms':>13s}{'whole p95 ms':>14s}")
    found = {f"simulated, host {host}": simulate(parts, load, host) for host in HOSTS}
    for name, seen in {"served": served, **found}.items():
        ttft, whole = (seen.p95(each) for each in ("ttft_ms", "e2e_ms"))
        print(f"{name:24s}{seen.carried_per_s:10.2f}{ttft:13.0f}{whole:14.0f}")
    beside = found["simulated, host beside"]
    errors = {
        "carried": beside.carried_per_s / served.carried_per_s,
        **{name: beside.p95(name) / served.p95(name) for name in ("ttft_ms", "e2e_ms")},
    }
    carried = {way: about["carried_per_s"] for way, about in ways.items()}
    held, still = (times[stage] for stage in ("held", "calm"))
    return [
        Figure(
            "batching", carried["monolith"] / carried["serial"], note="carried, over one at a time"
        ),
        Figure("apart_ratio", carried["apart"] / carried["monolith"], note="on one GPU"),
        Figure("prepare_ms", times["load"]["prepare"]["mean"], note="a picture, in one thread"),
        Figure("encoder_ms", times["load"]["encoder of 1"]["mean"], note="a picture, in a step"),
        Figure(
            "held_up_ms",
            held["step that holds others up"]["mean"] - still["step of tokens, up to 8"]["mean"],
            note="how much later a token comes when a picture does",
        ),
        *(
            Figure(f"{name}_err", 100.0 * abs(ratio - 1.0), 15.0, f"{100 * (ratio - 1):+.1f} %")
            for name, ratio in errors.items()
        ),
        Figure("errors", sum(bool(row.error) for row in rows), 0.0),
    ]


def main() -> None:
    """Do what the arguments say."""
    if "serve" not in sys.argv[1:2]:
        options(__doc__ or "")
        finish(figures())
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("serve",))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--base", type=float, help="requests/s that the load is a share of")
    given = parser.parse_args()
    serve(
        given.out.absolute(),
        tiny=given.tiny,
        seconds=given.seconds,
        ways=given.ways,
        base_per_s=given.base,
    )


if __name__ == "__main__":
    main()
