"""What is read: hardware, commands, offers, load, deadlines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UsageError
from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Gpu, Metadata, NodeService, encode_metadata
from atoll.runtime.join.deadline import Cloud, NodeDeadline, SpotNotices, parse_ends, slurm_end_s
from atoll.runtime.join.engine_command import precision_of, read_command
from atoll.runtime.join.engine_load import LoadReader, read_figures
from atoll.runtime.join.hardware import (
    GpuUse,
    gpu_type,
    gpus_from_text,
    gpus_of,
    list_visible,
    mean_use,
    read_hardware,
)
from atoll.runtime.join.offers import (
    Inspector,
    KnownServer,
    ServerOffer,
    UnhealthyError,
    config_precision,
    read_models,
)
from atoll.runtime.join.watcher import EngineProbe, Watcher, WatchSettings
from tests.runtime.join.shapes import METRICS, SHAPES, Shaped

GIB = 2**30
A100 = 81920 * 2**20


@dataclass
class FakeNvml:
    names: list[tuple[str, str, int]]

    def devices(self) -> list[tuple[str, str, int]]:
        return self.names

    def by_uuid(self, uuid: str) -> tuple[str, str, int]:
        return uuid, "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * GIB

    def use(self, index: int) -> GpuUse:
        return GpuUse(0.2 + 0.4 * index, 0.1 * index)


NVML = FakeNvml(
    [
        ("GPU-aa11", "NVIDIA A100-SXM4-80GB", A100),
        ("GPU-bb22", "NVIDIA A100-SXM4-80GB", A100),
        ("GPU-cc33", "NVIDIA L4", 23034 * 2**20),
    ]
)


@pytest.mark.parametrize(
    ("visible", "busy"), [(None, (0.6, 0.1)), ("1", (0.6, 0.1)), ("0,1", (0.4, 0.05)), ("", None)]
)
def test_gpus_are_as_busy_as_those_of_this_process(
    visible: str | None, busy: tuple[float, float] | None
) -> None:
    found = mean_use(NVML, visible)
    assert (None if found is None else tuple(found)) == (
        None if busy is None else pytest.approx(busy)
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [("A100-80", 2), ("L4", 1)]),
        ("0,2", [("A100-80", 1), ("L4", 1)]),
        ("GPU-cc", [("L4", 1)]),
        ("1,9,2", [("A100-80", 1)]),
        ("", []),
        ("-1", []),
        ("MIG-xyz", [("A100-SXM4-80GB MIG 3g.40gb", 1)]),
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    visible: str | None, expected: list[tuple[str, int]]
) -> None:
    assert [(gpu.type, gpu.count) for gpu in gpus_of(NVML, visible)] == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [(0, "A100-80"), (1, "A100-80"), (2, "L4")]),
        ("2,0", [(2, "L4"), (0, "A100-80")]),
        ("GPU-cc,1", [(2, "L4"), (1, "A100-80")]),
        ("MIG-xyz,2", [(2, "L4")]),  # only whole ones are given out
        ("", []),
    ],
)
def test_gpus_have_the_numbers_that_the_driver_gives_them(
    visible: str | None, expected: list[tuple[int, str]]
) -> None:
    found = list_visible(NVML.devices(), visible)
    assert [(gpu.id, gpu.type) for gpu in found] == expected


def test_a_gpu_in_another_form_keeps_its_own_name() -> None:
    assert gpu_type("NVIDIA H100 80GB HBM3", 81559 * 2**20) == "H100"
    assert gpu_type("NVIDIA H100 PCIe", 81559 * 2**20) == "H100-PCIe"
    assert gpu_type("NVIDIA H100 96GB HBM2e", 97871 * 2**20) == "H100 96GB HBM2e"
    assert gpu_type("NVIDIA A100", 40 * GIB) == "A100"  # the catalog's A100 has 80 GB
    assert gpu_type("Tesla T4", 15360 * 2**20) == "T4"


def test_this_machine_has_a_processor_and_memory() -> None:
    found = read_hardware({})
    assert found.cpus >= 1
    assert found.memory_bytes > 2**20
    assert found.cpu


def test_gpus_by_hand() -> None:
    assert gpus_from_text("L4:2")[0] == Gpu(type="L4", count=2, memory_bytes=24152899584)
    with pytest.raises(InputError, match="--gpus"):
        gpus_from_text("L5:2")


@pytest.mark.parametrize(
    ("command", "engine", "url", "model", "precision"),
    [
        (
            "vllm serve Qwen/Qwen2.5-7B",
            "vllm",
            "http://127.0.0.1:8000",
            "Qwen/Qwen2.5-7B",
            "unknown",
        ),
        (
            "vllm serve org/M-FP8 --port=9001 --host 0.0.0.0",
            *("vllm", "http://127.0.0.1:9001", "org/M-FP8", "fp8"),
        ),
        (
            "apptainer exec --nv image.sif python -m vllm.entrypoints.openai.api_server --model m",
            *("vllm", "http://127.0.0.1:8000", "m", "unknown"),
        ),
        (
            "srun --gres=gpu:1 --nodes 1 vllm serve m",
            "vllm",
            "http://127.0.0.1:8000",
            "m",
            "unknown",
        ),
        ("./server.py --model vllm", "", None, "vllm", "unknown"),
        (
            "python -m vllm.entrypoints.openai.api_server --model m --dtype half --port 81",
            *("vllm", "http://127.0.0.1:81", "m", "fp16"),
        ),
        (
            "python3 -m sglang.launch_server --model-path m --quantization awq --dtype half",
            *("sglang", "http://127.0.0.1:30000", "m", "int4"),
        ),
        (
            "/opt/llama-server -m qwen-q4_k_m.gguf --host ::1 --port 8081",
            *("llamacpp", "http://[::1]:8081", "qwen-q4_k_m.gguf", "int4"),
        ),
        (
            "text-generation-launcher --model-id m --quantize bitsandbytes-nf4 -p 3001",
            *("tgi", "http://127.0.0.1:3001", "m", "int4"),
        ),
        (
            "python -m atoll.engines.llamacpp --model f.gguf --port {port} --alias a",
            *("llamacpp", "http://127.0.0.1:4321", "f.gguf", "unknown"),
        ),
    ],
)
def test_commands_give_away(
    command: str, engine: str, url: str | None, model: str, precision: str
) -> None:
    port = 4321 if "{port}" in command else None
    read = read_command(command.split(), port=port)
    assert (read.engine, read.model, read.precision) == (engine, model, precision)
    if url is None:
        with pytest.raises(UsageError, match="--port"):
            _ = read.url
    else:
        assert read.url == url
    assert "{port}" not in " ".join(read.arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Meta-Llama-3.1-8B-Instruct-FP8", "fp8"),
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "int4"),
        ("model-Q8_0.gguf", "int8"),
        ("m-IQ2_XS.gguf", "int2"),
        ("Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("torch.bfloat16", "bf16"),
        ("gpt-oss-20b-mxfp4", "fp4"),
        ("Qwen2.5-7B-Instruct", None),
        ("q-learning-4", None),
    ],
)
def test_precision_of_names(text: str, expected: str | None) -> None:
    assert precision_of(text) == expected


def look(server: Shaped, **more: object) -> ServerOffer:
    async def run() -> ServerOffer:
        await server.start()
        try:
            return await Inspector(KnownServer(server.url, **more)).look(prove=True)  # type: ignore[arg-type]
        finally:
            await server.stop()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "version", "context", "precision"),
    [
        ("vllm", "0.10.1.1", 8192, "unknown"),
        ("sglang", "0.4.9.post2", 32768, "bf16"),
        ("llamacpp", "b5921-6c5bc064", 2048, "int8"),
        ("tgi", "3.0.1", 4096, "fp16"),
        ("atoll", "", 2048, "unknown"),
    ],
)
def test_every_engine_is_known_by_its_answers(
    kind: str, version: str, context: int, precision: str
) -> None:
    offer = look(Shaped(SHAPES[kind]("org/m")))
    assert (offer.engine, offer.version) == (kind, version)
    (service,) = offer.services
    assert (service.model, service.kind) == ("org/m", "llm")
    assert (service.context, service.precision) == (context, precision)


def test_a_version_that_says_it_is_unknown_is_none() -> None:
    pages = SHAPES["llamacpp"]("org/m")
    props = {**pages["/props"], "build_info": "b0-unknown"}
    assert look(Shaped({**pages, "/props": props})).version == ""


def test_what_the_user_says_wins() -> None:
    offer = look(
        Shaped(SHAPES["llamacpp"]("m")),
        precision="bf16",
        context=99,
        aliases={"m": ("gpt-4o",)},
        kind="embedding",
    )
    (service,) = offer.services
    assert (service.precision, service.context, service.aliases) == ("bf16", 99, ("gpt-4o",))
    assert service.kind == "embedding"


def test_an_embedding_model_is_known_by_what_it_makes() -> None:
    answers = SHAPES["vllm"]("e") | {"/v1/embeddings": {"data": [{"embedding": [0.5]}]}}
    server = Shaped(answers, status={"/v1/completions": 404})
    assert look(server).services[0].kind == "embedding"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"/health": 503}, "/health answered with status 503"),
        ({"/v1/models": 401}, "/v1/models answered with status 401"),
        ({"/v1/completions": 500}, "/v1/completions answered with status 500"),
        (
            {"/v1/completions": 400, "/v1/embeddings": 404, "/v1/chat/completions": 400},
            "no token: /v1/completions answered with status 400",
        ),
    ],
)
def test_a_server_that_does_not_do_its_work_is_not_well(
    status: dict[str, int], message: str
) -> None:
    with pytest.raises(UnhealthyError, match=message):
        look(Shaped(SHAPES["vllm"]("m"), status=status))


async def test_a_server_that_was_well_once_has_to_prove_it_again() -> None:
    server = Shaped(SHAPES["vllm"]("m"))
    await server.start()
    inspector = Inspector(KnownServer(server.url))
    offer = await inspector.look(prove=False)
    server.status["/v1/completions"] = 500
    assert await inspector.look(prove=False) == offer
    with pytest.raises(UnhealthyError, match="status 500"):
        await inspector.look(prove=True)
    await server.stop()


def test_a_server_without_health_is_judged_by_its_models() -> None:
    server = Shaped(SHAPES["vllm"]("m"), status={"/health": 404})
    assert look(server).engine == "vllm"
    with pytest.raises(UnhealthyError, match="/ready"):
        look(server, health="/ready")


def test_a_generic_service_is_asked_for_its_health_only() -> None:
    server = Shaped({"/ping": {}})
    offer = look(server, health="/ping", generic="ocr")
    assert (offer.services[0].model, offer.services[0].kind) == ("ocr", "generic")
    assert server.seen == ["GET /ping"]


@given(st.binary(max_size=80) | st.just(b'{"data": []}') | st.just(b'{"data": [{"id": 3}]}'))
def test_whatever_models_answers_is_a_list_or_not_well(body: bytes) -> None:
    with pytest.raises(UnhealthyError):
        read_models(body)


def test_names_that_no_record_may_hold_are_left_out() -> None:
    answers = SHAPES["vllm"]("org/m")
    bad = [{"id": "x" * 300}, {"id": "a\x1b[31m"}, {"id": ""}, {"id": 3}]
    answers["/v1/models"]["data"] += bad
    answers["/v1/models"]["data"][0]["max_model_len"] = 2**50
    offer = look(Shaped(answers))
    assert [service.model for service in offer.services] == ["org/m"]
    metadata = Metadata(name="n", provider="p", role="worker", services=offer.services)
    encode_metadata(metadata)


def test_precision_of_weights_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert config_precision(str(tmp_path)) == "bf16"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 8}}
    (snapshot / "config.json").write_text(json.dumps(quantised))
    assert config_precision("org/m") == "int8"
    assert config_precision("org/other") is None
    assert config_precision("../../etc") is None


@pytest.mark.parametrize("kind", sorted(METRICS))
def test_load_is_read_from_every_engine(kind: str) -> None:
    found = read_figures(METRICS[kind].encode())
    assert (found["running"], found["waiting"]) == (3, 2)
    assert found.get("kv", 0.25) == 0.25


def test_odd_figures_are_left_out() -> None:
    text = (
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\nvllm:num_requests_waiting x"
    )
    assert read_figures(text) == {}


def test_load_is_told_when_it_changes() -> None:
    said: list[Load] = []
    inflight = 0

    async def run() -> None:
        nonlocal inflight
        server = Shaped(SHAPES["vllm"]("m"), metrics=METRICS["vllm"])
        await server.start()
        reader = LoadReader(server.url, lambda: inflight, said.append, capacity=8)
        await reader.step(0.0)
        await reader.step(1.0)
        assert len(said) == 1
        assert (said[0].running, said[0].waiting, said[0].capacity) == (3, 2, 8)
        server.metrics = METRICS["vllm"].replace("1200.0", "1300.0")
        reader._cost_s = 0.0
        await reader.step(3.0)
        assert said[-1].tokens_per_s == 50.0
        await server.stop()
        reader._cost_s = 0.0
        inflight = 7
        await reader.step(9.0)
        assert (said[-1].running, said[-1].waiting) == (7, 0)
        # Nobody publishes figures any more, so only what came through here counts.
        await reader.step(10.0)
        assert len(said) == 3
        # Some came later and want to know too.
        await reader.step(25.0)
        assert len(said) == 4

    asyncio.run(run())


async def test_who_runs_in_this_process_is_not_asked_over_http() -> None:
    """`atoll serve --fabric` asked its own gateway for a page that is for admins, and was refused."""
    said: list[Load] = []
    figures = {"running": 5.0, "waiting": 2.0, "tokens": 100.0}
    nowhere = "http://127.0.0.1:9"
    reader = LoadReader(nowhere, lambda: 1, said.append, figures=lambda: figures)
    await reader.step(0.0)
    figures["tokens"] = 300.0
    await reader.step(2.0)
    assert [(s.running, s.waiting, s.tokens_per_s) for s in said] == [(5, 2, 0.0), (5, 2, 100.0)]
    assert await reader.running() == 7


def test_ends() -> None:
    assert parse_ends("2h", 1000.0) == 8200.0
    assert parse_ends("2025-07-01T18:00:00+00:00", 0.0) == 1751392800.0
    with pytest.raises(InputError, match="--ends"):
        parse_ends("tomorrow", 0.0)


def test_slurm_says_when_a_job_ends() -> None:
    asked: list[str] = []
    local = datetime(2025, 7, 1, 18, 0).timestamp()  # noqa: DTZ001  Slurm writes local time

    async def run(command: tuple[str, ...]) -> str | None:
        asked.append(command[0])
        return (
            None if command[0] == "squeue" else "JobId=7 EndTime=2025-07-01T18:00:00 Deadline=N/A"
        )

    environment = {"SLURM_JOB_ID": "7"}
    assert asyncio.run(slurm_end_s(environment, run)) == local
    assert asked == ["squeue", "scontrol"]
    known = environment | {"SLURM_JOB_END_TIME": "1751392800"}
    assert asyncio.run(slurm_end_s(known)) == 1751392800.0
    assert asyncio.run(slurm_end_s({})) is None
    assert asyncio.run(slurm_end_s({"SLURM_JOB_ID": "7; rm -rf /"}, run)) is None


def test_a_deadline_comes_nearer() -> None:
    deadline = NodeDeadline(asked_s=500.0)
    deadline.notice(300.0)
    deadline.notice(400.0)
    assert deadline.ends_s == 300.0
    deadline.batch_s = 200.0
    assert deadline.ends_s == 200.0
    deadline.batch_s = 900.0
    assert deadline.ends_s == 300.0


class Raw(Shaped):
    """Answers with plain text."""

    texts: dict[str, tuple[int, str]]

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
        status, text = self.texts.get(path, (404, ""))
        self._write(writer, status, text.encode(), "text/plain")
        await writer.drain()


AWS = {
    "/latest/api/token": (200, "secret"),
    "/latest/meta-data/spot/instance-action": (
        200,
        '{"action": "terminate", "time": "2025-07-01T18:00:00Z"}',
    ),
}
AZURE = {
    "/metadata/scheduledevents?api-version=2020-07-01": (
        200,
        json.dumps(
            {
                "Events": [
                    {"EventType": "Reboot", "NotBefore": "Tue, 01 Jul 2025 10:00:00 GMT"},
                    {"EventType": "Preempt", "NotBefore": "Tue, 01 Jul 2025 18:00:00 GMT"},
                ]
            }
        ),
    )
}


@pytest.mark.parametrize(
    ("cloud", "texts", "expected"),
    [
        ("aws", AWS, 1751392800.0),
        ("aws", {"/latest/api/token": (200, "secret")}, None),
        ("aws", AWS | {"/latest/meta-data/spot/instance-action": (200, "[]")}, None),
        ("gcp", {"/computeMetadata/v1/instance/preempted": (200, "TRUE")}, 1030.0),
        ("gcp", {"/computeMetadata/v1/instance/preempted": (200, "FALSE")}, None),
        ("azure", AZURE, 1751392800.0),
        ("azure", {}, None),
    ],
)
def test_spot_notices(
    cloud: Cloud, texts: dict[str, tuple[int, str]], expected: float | None
) -> None:
    async def run() -> float | None:
        server = Raw({})
        server.texts = texts
        await server.start()
        try:
            return await SpotNotices(cloud, server.url).end_s(1000.0)
        finally:
            await server.stop()

    assert asyncio.run(run()) == expected


def test_no_cloud_is_no_notice() -> None:
    async def run() -> float | None:
        async with asyncio.timeout(60):
            return await SpotNotices("aws", "http://127.0.0.1:9").end_s(0.0)

    assert asyncio.run(run()) is None


# Watching


class Scripted(Inspector):
    """Sees what it is told to see, one look after the other; waits where `gate` is closed."""

    def __init__(self, looks: list[ServerOffer | str]) -> None:
        super().__init__(KnownServer("http://nowhere"))
        self.looks = looks
        self.proved: list[bool] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def look(self, *, prove: bool) -> ServerOffer:
        self.proved.append(prove)
        await self.gate.wait()
        seen = self.looks.pop(0)
        if isinstance(seen, str):
            raise UnhealthyError(seen)
        return seen


ONE, TWO = (ServerOffer((NodeService(model=name),)) for name in ("a", "b"))


async def test_a_watcher_tells_of_changes_and_asks_for_tokens_when_it_matters() -> None:
    changes: list[ServerOffer | None] = []
    inspector = Scripted(["no", ONE, ONE, TWO, "no", TWO, "no", "no", "no", TWO])
    watcher = Watcher(inspector, lambda: changes.append(watcher.offer), WatchSettings(1.0, 2))
    while inspector.looks:
        await watcher.look()
    assert changes == [ONE, TWO, None, TWO]
    unproved = [False] * 3
    assert inspector.proved == [True, True, False, False, *unproved, False, True, True]


async def test_what_was_seen_of_an_earlier_process_does_not_count() -> None:
    changes: list[None] = []
    inspector = Scripted([ONE, ONE])
    inspector.gate.clear()
    watcher = Watcher(inspector, lambda: changes.append(None))
    looking = asyncio.create_task(watcher.look())
    await asyncio.sleep(0)
    watcher.reset()
    inspector.gate.set()
    await looking
    assert watcher.offer is None
    assert not changes
    await watcher.look()
    assert watcher.offer == ONE


async def test_a_server_that_was_withdrawn_is_looked_at_again_soon() -> None:
    inspector = Scripted([ONE, "no", "no", TWO])
    back = asyncio.Event()

    def changed() -> None:
        # The interval is a minute: the bad look has to be asked for, the good one not.
        if watcher.offer == ONE:
            asyncio.get_running_loop().call_soon(watcher.hurry)
        elif watcher.offer == TWO:
            back.set()

    watcher = Watcher(inspector, changed, WatchSettings(60.0, 1))
    watching = asyncio.create_task(watcher.run())
    await asyncio.wait_for(back.wait(), 30.0)
    watching.cancel()


async def test_an_engine_is_hung_only_after_a_while() -> None:
    inspector = Scripted(["loading", ONE, "no", "no"])
    watcher = Watcher(inspector, lambda: None, WatchSettings(1.0, 1))
    patient, hasty = EngineProbe(watcher, 60.0), EngineProbe(watcher, 0.0)
    await watcher.look()
    assert await patient.check(1) == "loading"
    await watcher.look()
    assert await patient.check(1) is None
    await watcher.look()
    assert watcher.offer is None
    assert await patient.check(1) is None
    assert await hasty.check(1) == "no"
    patient.reset()
    assert await patient.check(1) == "starting"
