"""A vision-language model on one GPU in two executors and in one, under the same load, and as simulated.

    python -m benchmarks.gpu_any serve OUT [--tiny] [--seconds 40]     (where the GPU is)
    python -m benchmarks.gpu_any                                       (anywhere: the table and the figures)

Qwen2.5-VL-7B with random weights in bf16, by Atoll's own components `transformers-vision` and
`transformers-chat`: a `plan` has the tower and the llm in an executor each, a `monolith` both in one process.
Both share the one GPU. Requests are texts, and questions about a picture of 1280 x 720; all want answers of
the same length. `serve` needs neither a planner nor a simulator, nor weights from anywhere:

1. makes the checkpoint on the GPU (`gpu_any.json` has when, versions and seconds);
2. measures each part by itself: batches of pictures, batches of answers;
3. brings each deployment up, as `atoll tasks serve` does; `CLIENTS` clients that ask again when they are
   answered find what it carries; then requests come in an open loop, at 70 % of what the monolith carries and
   with the same arrivals for all.

`gpu_any.csv` has a row for every request. What is simulated is told the parts' seconds of step 2 and nothing
of step 3. `--tiny` does all of it with a small model on the CPU, as a test.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.any_to_any.task_clients import (
    AskError,
    ClientOrder,
    HeardReply,
    ask,
    chat_order,
    picture_part,
)
from benchmarks.report import ROOT, Figure, finish, options

if TYPE_CHECKING:
    from atoll.sim.tasks.task_fleet import BatchPart, PartModel, TaskFleet

RESULTS = ROOT / "benchmarks" / "results"
SERVICE, TEXT, PICTURE = "look", "text", "image+text"
WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "monolith": (("vision", "llm"),),
    "plan": (("vision",), ("llm",)),
}
"""Deployments, and the parts of each of their executors; what the first carries sets the load."""
PICTURE_SHARE = 0.6
LOAD = 0.7
CLIENTS = 24
CARRIED = 72
"""Requests by which it is found what a deployment carries."""
MAX_BATCH = 16
_COMPONENTS = {"vision": "transformers-vision", "llm": "transformers-chat"}
_VISION_BATCH = 8
_SEED = 37
_WORDS = 200
_WARM_UP = 24


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and what is asked of it: sizes, the picture's, tokens of answers, and where it runs."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    patch: int
    picture: tuple[int, int]
    answer: int
    device: str
    dtype: str
    first_mark: int

    @property
    def name(self) -> str:
        """How notes call it."""
        layers, width = self.text["num_hidden_layers"], self.text["hidden_size"]
        return f"qwen2_5_vl, {layers} layers of {width}, {self.dtype} on {self.device}"


FULL = Shape(
    text={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "mrope_section": [16, 24, 24],
    },
    vision={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    patch=14,
    picture=(1280, 720),
    answer=48,
    device="cuda:0",
    dtype="bfloat16",
    first_mark=151652,
)
TINY = Shape(
    text={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 400,
        "max_position_embeddings": 4096,
        "mrope_section": [2, 1, 1],
    },
    vision={
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    patch=4,
    picture=(96, 64),
    answer=8,
    device="cpu",
    dtype="float32",
    first_mark=390,
)
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_END = 1
"""Token that ends an answer; it is never likely, so that all answers are as long as they may be."""


class Asked(NamedTuple):
    """A request as its client saw it: the deployment, the run, seconds since its begin, and times in ms."""

    way: str
    run: str
    arrival_s: str
    klass: str
    ttft_ms: str
    e2e_ms: str
    error: str


@dataclass(frozen=True, slots=True)
class BatchTime:
    """Seconds of a batch of a part alone: to the first token of all (0: there are none), and to the end."""

    part: str
    klass: str
    batch: int
    first_s: float
    whole_s: float


# Serving


def make_config(shape: Shape) -> Any:
    """Return the configuration of a model of that shape."""
    import transformers

    text = dict(shape.text)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": text.pop("mrope_section")}
    start, end, image, video = range(shape.first_mark, shape.first_mark + len(_MARKS))
    return transformers.Qwen2_5_VLConfig(
        text_config=text
        | {
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": _END,
            "pad_token_id": 0,
        },
        vision_config=dict(shape.vision)
        | {"patch_size": shape.patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        eos_token_id=_END,
    )


def pixel_options(shape: Shape) -> dict[str, Any]:
    """Return what processors of pictures are told."""
    return {
        "patch_size": shape.patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * shape.patch**2, "longest_edge": 5120 * shape.patch**2},
    }


def write_words(shape: Shape, folder: Path) -> None:
    """Write a tokenizer of made-up words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"w{at}": at for at in range(shape.first_mark)}
    words |= {mark: shape.first_mark + at for at, mark in enumerate(_MARKS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": f"w{_END}",
        "unk_token": "w2",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Write a model of random weights, made where it will run, with its tokens and its image processor."""
    import torch
    import transformers

    torch.manual_seed(_SEED)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with torch.device(shape.device):
            model = transformers.Qwen2_5_VLForConditionalGeneration(make_config(shape))
    finally:
        torch.set_default_dtype(usual)
    with torch.no_grad():
        # As a model that was taught, it says no mark; and here no end, either.
        model.lm_head.weight[shape.first_mark :] = 0.0
        model.lm_head.weight[:3] = 0.0
    model.generation_config = transformers.GenerationConfig(eos_token_id=_END, pad_token_id=0)
    model.save_pretrained(folder, max_shard_size="4GB")
    write_words(shape, folder)
    transformers.Qwen2VLImageProcessorPil(**pixel_options(shape)).save_pretrained(folder)


def _picture(shape: Shape, number: int) -> np.ndarray[Any, Any]:
    """Return a picture of blocks of colour, each its own."""
    width, height = shape.picture
    blocks = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3))
    return blocks.astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)


def draw_words(shape: Shape, number: int, count: int) -> str:
    """Return so many made-up words, each number its own."""
    drawn = random.Random(number)
    return " ".join(f"w{drawn.randrange(3, shape.first_mark)}" for _ in range(count))


def measure_parts(shape: Shape, folder: Path) -> list[BatchTime]:
    """Measure batches of each part with nothing beside it; the second of two runs of each counts."""
    from atoll.components.base import Setup
    from atoll.components.component_registry import find_component

    setup = Setup(shape.device, _threads(shape), {"model": str(folder)})
    see: Any = find_component(_COMPONENTS["vision"]).load(setup)
    pictures = [{"image": _picture(shape, number)} for number in range(_VISION_BATCH)]
    found: list[BatchTime] = []
    seen: Any = None
    for batch in (1, 2, _VISION_BATCH):
        see.run(pictures[:batch])
        begun_s = time.perf_counter()
        seen = see.run(pictures[:batch])[0]
        found.append(BatchTime("vision", PICTURE, batch, 0.0, time.perf_counter() - begun_s))
    chat = Setup(shape.device, _threads(shape), {"model": str(folder), "max_batch": MAX_BATCH})
    think: Any = find_component(_COMPONENTS["llm"]).load(chat)
    contents = {
        TEXT: [{"type": "text", "text": draw_words(shape, 1, _WORDS)}],
        PICTURE: [
            {"type": "embeds", "embeds": seen},
            {"type": "text", "text": draw_words(shape, 2, 20)},
        ],
    }
    return found + asyncio.run(_measure_chat(shape, think, contents))


async def _measure_chat(
    shape: Shape, think: Any, contents: Mapping[str, list[dict[str, Any]]]
) -> list[BatchTime]:
    def inputs(klass: str, tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": contents[klass]}
        return {"messages": [message], "max_tokens": tokens, "temperature": 0.0}

    async def answer(given: dict[str, Any], started: asyncio.Event | None = None) -> list[float]:
        times = []
        async for _ in think.stream(given):
            times.append(time.perf_counter())
            if started is not None:
                started.set()
        return times

    async def measure(klass: str, batch: int) -> BatchTime:
        # The batch gathers while another answer is made, as it would under load; to read vectors takes time.
        running, tokens = asyncio.Event(), 6 if klass == TEXT else 6 + 6 * batch
        before = asyncio.create_task(answer(inputs(TEXT, tokens), running))
        await running.wait()
        answers = asyncio.gather(*(answer(inputs(klass, shape.answer)) for _ in range(batch)))
        begun_s = (await before)[-1]
        times = await answers
        firsts = [each[0] for each in times]
        if max(firsts) - min(firsts) > 0.5 * (times[0][-1] - times[0][0]):
            print(f"{batch} of {klass} were no one batch", flush=True)
        first_s = max(each[0] for each in times) - begun_s
        return BatchTime("llm", klass, batch, first_s, max(each[-1] for each in times) - begun_s)

    found: list[BatchTime] = []
    await think.start()
    for klass in contents:
        for batch in (1, MAX_BATCH // 2, MAX_BATCH):
            await measure(klass, batch)
            found.append(await measure(klass, batch))
    await think.close()
    return found


def _threads(shape: Shape) -> int:
    return 1 if shape.device == "cpu" else 4


def tasks_file(shape: Shape, way: str, model: Path, folder: Path) -> Path:
    """Write what `atoll tasks serve` is told of a deployment."""
    given = {
        "vision": {"model": str(model)},
        "llm": {"model": str(model), "max_batch": MAX_BATCH, "max_length": 4096},
    }
    executors = {
        "-".join(parts): {
            "components": {_COMPONENTS[part]: given[part] for part in parts},
            "device": shape.device,
            "threads": _threads(shape),
        }
        for parts in WAYS[way]
    }
    path = folder / f"{way}.yaml"
    path.write_text(json.dumps({"services": {SERVICE: {}}, "executors": executors}))
    return path


class Asker:
    """Clients of one deployment: each request is one of a kind, and what they saw is kept."""

    def __init__(self, shape: Shape, url: str, way: str) -> None:
        self._shape, self.url, self._way = shape, url, way
        self.rows: list[Asked] = []
        self.pictures: dict[int, bytes] = {}
        """PNGs that were drawn ahead, by number."""

    async def ask(self, run: str, number: int, klass: str, arrival_s: float) -> None:
        """Ask, and note what came of it."""
        content: Any = draw_words(self._shape, number, _WORDS)
        if klass == PICTURE:
            text = {"type": "text", "text": draw_words(self._shape, number, 20)}
            drawn = self.pictures.get(number) or draw_png(self._shape, number)
            content = [picture_part(drawn), text]
        order = chat_order(str(number), SERVICE, klass, content, self._shape.answer)
        reply, error = HeardReply(), ""
        try:
            await self.send(order, reply)
        except AskError as wrong:
            error = str(wrong)[:200]
        first = "" if error or reply.first_s is None else f"{1e3 * reply.first_s:.1f}"
        whole = "" if error else f"{1e3 * reply.took_s:.1f}"
        self.rows.append(Asked(self._way, run, f"{arrival_s:.4f}", klass, first, whole, error))

    async def send(self, order: ClientOrder, reply: HeardReply) -> None:
        """Send a request, and note what comes; `AskError` if that is not all."""
        await ask(self.url, order, reply)

    async def saturate(self, run: str, count: int, seed: int) -> float:
        """Have clients ask until so many are answered; returns requests/s."""
        left = iter(draw_mix(count, seed))
        begun_s = time.monotonic()

        async def client() -> None:
            for number, klass in left:
                await self.ask(run, number, klass, time.monotonic() - begun_s)

        await asyncio.gather(*(client() for _ in range(min(CLIENTS, count))))
        return count / (time.monotonic() - begun_s)

    async def load(self, arrivals: Sequence[tuple[float, int, str]]) -> None:
        """Ask when it is due, whatever became of others."""
        begun_s = time.monotonic() + 0.2

        async def later(arrival_s: float, number: int, klass: str) -> None:
            await asyncio.sleep(max(0.0, begun_s + arrival_s - time.monotonic()))
            await self.ask("load", number, klass, arrival_s)

        await asyncio.gather(*(later(*each) for each in arrivals))


def draw_png(shape: Shape, number: int) -> bytes:
    """Return a picture as a PNG."""
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(_picture(shape, number)).save(written, "PNG", compress_level=1)
    return written.getvalue()


def draw_mix(count: int, seed: int) -> Iterable[tuple[int, str]]:
    """Yield numbers and classes, with the share of pictures exact over every ten."""
    drawn = random.Random(seed)
    pictures = round(10 * PICTURE_SHARE)
    ten: list[str] = []
    for at in range(count):
        if not ten:
            ten = [PICTURE] * pictures + [TEXT] * (10 - pictures)
            drawn.shuffle(ten)
        yield 1000 * seed + at, ten.pop()


def draw_arrivals(rate_per_s: float, seconds: float) -> list[tuple[float, int, str]]:
    """Draw Poisson arrivals of the load: seconds, number, class."""
    drawn = random.Random(_SEED)
    due: list[float] = []
    now_s = drawn.expovariate(rate_per_s)
    while now_s < seconds:
        due.append(now_s)
        now_s += drawn.expovariate(rate_per_s)
    return [(at, *each) for at, each in zip(due, draw_mix(len(due), _SEED), strict=True)]


async def _serve(
    shape: Shape, way: str, file: Path, seconds: float, base_per_s: float | None
) -> tuple[dict[str, Any], list[Asked]]:
    """Bring a deployment up and load it; `base_per_s` is what the load is a share of, None: its own."""
    from atoll.runtime.local.local_endpoints import LocalOptions
    from atoll.runtime.local.serving import ServingRun, local_fleet
    from atoll.runtime.task_fleet.parts_file import read_tasks_file

    begun_s = time.monotonic()
    with local_fleet(
        None,
        {},
        LocalOptions(),
        name=way,
        host="127.0.0.1",
        port=0,
        log=file.with_suffix(".log"),
        on_progress=lambda name, state, why: print(f"  {name} {state} {why}".rstrip(), flush=True),
        tasks=read_tasks_file(file),
    ) as fleet:
        run = ServingRun(fleet, 5.0)
        await run.start()
        try:
            note: dict[str, Any] = {"ready_s": round(time.monotonic() - begun_s, 1)}
            asker = Asker(shape, fleet.url, way)
            await asker.saturate("warm-up", _WARM_UP, 1)
            note["carried_per_s"] = round(await asker.saturate("carried", CARRIED, 2), 4)
            rate = LOAD * (base_per_s or note["carried_per_s"])
            note["load_per_s"] = round(rate, 4)
            await asker.load(draw_arrivals(rate, seconds))
            print(way, note, summarise(asker.rows), flush=True)
        finally:
            await run.finish()
    return note, asker.rows


def serve(out: Path, *, tiny: bool, seconds: float) -> None:
    """Do all that needs the GPU, and write what came of it after each step."""
    shape = TINY if tiny else FULL
    out.mkdir(parents=True, exist_ok=True)
    # In memory where there is room: nothing of it is kept.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 20 * 2**30
    note: dict[str, Any] = {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": shape.name,
        "picture": list(shape.picture),
        "answer": shape.answer,
        "words": _WORDS,
        "gpu": find_gpu(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as temporary:
        folder = Path(temporary)
        model = folder / "model"
        for step, arguments in (("checkpoint", []), ("parts", [str(out)])):
            begun_s = time.monotonic()
            command = [sys.executable, "-m", "benchmarks.hardware.gpu_any", step, str(model)]
            # In processes of their own: what they held of the GPU is free again afterwards.
            subprocess.run([*command, *arguments, *(["--tiny"] if tiny else [])], check=True)
            note[f"{step}_s"] = round(time.monotonic() - begun_s, 1)
            print(step, note[f"{step}_s"], flush=True)
        note["parts"] = json.loads((out / "gpu_any_parts.json").read_text())
        (out / "gpu_any_parts.json").unlink()
        rows: list[Asked] = []
        base_per_s: float | None = None
        note["ways"] = {}
        for way in WAYS:
            file = tasks_file(shape, way, model, folder)
            found, seen = asyncio.run(_serve(shape, way, file, seconds, base_per_s))
            note["ways"][way] = found
            base_per_s = base_per_s or found["carried_per_s"]
            rows += seen
            (out / "gpu_any.json").write_text(json.dumps(note, indent=1) + "\n")
            with (out / "gpu_any.csv").open("w", newline="") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(Asked._fields)
                writer.writerows(rows)


def find_gpu() -> str:
    """Return the name and driver of the GPU here."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return "none"


def summarise(rows: Sequence[Asked]) -> str:
    """Say in a line what clients saw under load."""
    load = [row for row in rows if row.run == "load"]
    good = [row for row in load if not row.error]
    if not good:
        return "nothing came back"
    ttft = [float(row.ttft_ms) for row in good]
    return (
        f"{len(load)} requests, {len(load) - len(good)} errors, TTFT mean {np.mean(ttft):.0f}"
        f" p95 {np.percentile(ttft, 95):.0f} ms"
    )


# Figures


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests/s that a deployment carries, and milliseconds under load by request."""

    carried_per_s: float
    ttft_ms: np.ndarray[Any, Any]
    e2e_ms: np.ndarray[Any, Any]

    def p95(self, name: str) -> float:
        """Return the 95th percentile of "ttft_ms" or "e2e_ms"."""
        return float(np.percentile(getattr(self, name), 95))


def simulate(
    note: Mapping[str, Any],
    load: Sequence[Asked],
    devices: Sequence[Sequence[str]] = (("vision", "llm"),),
) -> Seen:
    """Return what parts do in simulation, told what each takes alone: those of a device take turns there.

    Both deployments have one device, whatever processes there are on it.
    """
    from atoll.sim.tasks.simulate_tasks import simulate_tasks
    from atoll.sim.tasks.task_demand import Arrivals, Demand

    parts = [BatchTime(**each) for each in note["parts"]]
    fleet, decode_s = _fleet(devices, parts)
    carried = simulate_tasks(fleet, requests=600, arrivals=Arrivals(at_once=True), seed=_SEED)
    order = sorted(load, key=lambda row: float(row.arrival_s))
    names = [klass.name for klass in fleet.classes]
    ones = np.ones(len(order))
    demand = Demand(
        np.array([float(row.arrival_s) for row in order]),
        np.array([names.index(row.klass) for row in order]),
        ones,
        ones,
    )
    e2e_s = simulate_tasks(fleet, demand=demand, warmup=0.0).columns.e2e_s
    return Seen(carried.by_makespan_per_s, 1e3 * (e2e_s - decode_s), 1e3 * e2e_s)


def _fleet(devices: Sequence[Sequence[str]], times: Sequence[BatchTime]) -> tuple[TaskFleet, float]:
    """Return parts on devices as they are simulated, and the seconds of an answer after its first token.

    transformers answers a batch as a whole: those that come meanwhile wait for its end. So the llm is a part
    that works on batches; all answers are as long.
    """
    from atoll.sim.tasks.task_fleet import (
        ClassSpec,
        ExecutorSpec,
        PartEdge,
        PartNeed,
        PathSpec,
        StepSpec,
        TaskFleet,
    )

    models: dict[str, PartModel] = {
        "vision": _part(times, "vision", _VISION_BATCH),
        "llm": _part(times, "llm", MAX_BATCH),
    }
    classes = (
        ClassSpec(SERVICE, TEXT, 1.0 - PICTURE_SHARE, {"llm": PartNeed()}),
        ClassSpec(
            SERVICE,
            PICTURE,
            PICTURE_SHARE,
            {"vision": PartNeed(), "llm": PartNeed()},
            (PartEdge("vision", "llm"),),
        ),
    )
    executors = tuple(
        ExecutorSpec("-".join(parts), "box", SERVICE, {part: models[part] for part in parts})
        for parts in devices
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
    answers = [each for each in times if each.part == "llm" and each.batch > 1]
    decode_s = float(np.mean([each.whole_s - each.first_s for each in answers]))
    return TaskFleet(executors, classes, paths), decode_s


def _part(times: Sequence[BatchTime], part: str, most: int) -> BatchPart:
    """Return a part whose batches take a fixed time and one for each item, fitted to those measured."""
    from atoll.sim.tasks.task_fleet import BatchPart

    mine = [each for each in times if each.part == part]
    classes = list(dict.fromkeys(each.klass for each in mine))
    # One fixed time for all classes and one more for an item of each, by least squares of relative errors.
    rows = [[1.0, *(each.batch * (each.klass == klass) for klass in classes)] for each in mine]
    weights = np.array([1.0 / each.whole_s for each in mine])
    found = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(mine)), rcond=None)[0]
    fixed_s, *item_s = (max(float(each), 0.0) for each in found)
    least = 1e-6
    return BatchPart(
        {klass: max(each, least) for klass, each in zip(classes, item_s, strict=True)},
        fixed_s=fixed_s,
        max_batch=most,
    )


def read(results: Path = RESULTS) -> tuple[dict[str, Any], dict[str, tuple[Seen, Seen, int]]]:
    """Return the notes, and by deployment what was served, what was simulated, and errors."""
    note = json.loads((results / "gpu_any.json").read_text())
    with (results / "gpu_any.csv").open() as stream:
        rows = [Asked(**row) for row in csv.DictReader(stream)]
    found = {}
    for way, about in note["ways"].items():
        load = [row for row in rows if (row.way, row.run) == (way, "load")]
        good = [row for row in load if not row.error]
        served = Seen(
            about["carried_per_s"],
            np.array([float(row.ttft_ms) for row in good]),
            np.array([float(row.e2e_ms) for row in good]),
        )
        errors = sum(bool(row.error) for row in rows if row.way == way)
        found[way] = served, simulate(note, good), errors
    return note, found


def _loads(results: Path, way: str) -> list[Asked]:
    """Return the requests of the load on a deployment."""
    with (results / "gpu_any.csv").open() as stream:
        rows = [Asked(**row) for row in csv.DictReader(stream)]
    return [row for row in rows if (row.way, row.run) == (way, "load")]


def figures(results: Path = RESULTS) -> list[Figure]:
    """Print the table, and return the figures."""
    note, found = read(results)
    print(f"{note['model']}; {note['gpu']}; {note['versions']}")
    print(
        f"{'':10s}{'carried/s':>18s}{'TTFT p95 ms':>18s}{'whole p95 ms':>18s}  served / simulated"
    )
    for way, (served, simulated, _) in found.items():
        pairs = (
            (served.carried_per_s, simulated.carried_per_s),
            *((served.p95(name), simulated.p95(name)) for name in ("ttft_ms", "e2e_ms")),
        )
        print(f"{way:10s}" + "".join(f"{a:9.4g} /{b:7.4g}" for a, b in pairs))
    plan, monolith = found["plan"], found["monolith"]
    apart = simulate(note, _loads(results, "plan"), WAYS["plan"])
    made = [
        Figure("carried_ratio", plan[0].carried_per_s / monolith[0].carried_per_s, note="served"),
        Figure(
            "ttft_p95_ratio", plan[0].p95("ttft_ms") / monolith[0].p95("ttft_ms"), note="served"
        ),
        Figure("two_gpus_carried", apart.carried_per_s, note="simulated, a GPU for each executor"),
    ]
    for way, (served, simulated, errors) in found.items():
        off = 100.0 * (simulated.carried_per_s / served.carried_per_s - 1.0)
        late = 100.0 * (simulated.p95("ttft_ms") / served.p95("ttft_ms") - 1.0)
        made += [
            Figure(f"{way}_carried_err", abs(off), 15.0, f"{off:+.1f} %"),
            Figure(f"{way}_ttft_p95_err", abs(late), 15.0, f"{late:+.1f} %"),
            Figure(f"{way}_errors", errors, 0.0),
        ]
    return made


def main() -> None:
    """Do what the arguments say."""
    if not {"serve", "checkpoint", "parts"} & set(sys.argv[1:2]):
        options(__doc__ or "")
        finish(figures())
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("serve", "checkpoint", "parts"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=40.0)
    given = parser.parse_args()
    shape = TINY if given.tiny else FULL
    if given.verb == "serve":
        serve(given.folder, tiny=given.tiny, seconds=given.seconds)
    elif given.verb == "checkpoint":
        write_checkpoint(shape, given.folder)
    else:
        found = [asdict(each) for each in measure_parts(shape, given.folder)]
        (given.out / "gpu_any_parts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
