"""What the gateway answers by itself."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.core.errors import InputError
from atoll.core.paths import runtime_dir
from atoll.core.version import __version__
from atoll.planner.fleet_pages import ask_fleet
from atoll.runtime.gateway.settings import GatewayFile, GatewaySettings, HealthSettings
from atoll.runtime.local.fleet_state import FleetState
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import CHAT, chat, running


def two_models() -> list[ScriptedEngine]:
    return [ScriptedEngine(), ScriptedEngine(model="org/other")]


async def test_models() -> None:
    async with running(two_models()) as bench:
        listed = (await bench.get("/v1/models")).json
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["m", "org/other"]
        assert all(m["object"] == "model" for m in listed["data"])
        assert (await bench.get("/v1/models/org/other?x=1")).json["id"] == "org/other"
        assert (await bench.get("/v1/models/none")).status == 404


async def test_models_are_described_as_their_backends_do() -> None:
    """Vercel's, LangChain's and others' clients read how long a context may be."""
    said: dict[str, Any] = {"max_model_len": 4096, "root": "org/m-7b", "owned_by": "vllm"}
    engines = [
        ScriptedEngine(kind="vllm", listed=said),
        ScriptedEngine(kind="vllm", listed=said | {"max_model_len": 2048}),
        ScriptedEngine(model="org/other", listed={"owned_by": 3, "max_model_len": "long"}),
    ]
    health = HealthSettings(interval_s=0.01)
    async with running(engines, health=health, aliases={"short": "m"}) as bench:
        members = bench.gateway.pool.members.values()
        while any(member.listed is None for member in members):
            await asyncio.sleep(0.01)
        for name in ("m", "short"):
            found = (await bench.get(f"/v1/models/{name}")).json
            assert found["id"] == name
            assert {key: found[key] for key in said} == said | {"max_model_len": 2048}
        other = (await bench.get("/v1/models/org/other")).json
        assert (other["root"], other["owned_by"]) == ("org/other", "atoll-gateway")
        assert "max_model_len" not in other


async def test_pages_of_vllm() -> None:
    engines = [ScriptedEngine(kind="vllm"), ScriptedEngine(model="org/other", kind="openai")]
    async with running(engines) as bench:
        assert (await bench.get("/version")).json == {"version": __version__}
        assert (await bench.get("/load")).json == {"server_load": 0}
        assert (await bench.get("/ping")).status == 200
        assert (await bench.post("/ping", {})).status == 200
        assert (await bench.post("/version", {})).status == 405
        assert (await bench.get("/tokenizer_info")).status == 400
        told = await bench.get("/tokenizer_info?model=m")
        assert (told.status, told.json["chat_template"]) == (200, "t")
        for unknown in ("org/other", "nobody"):
            assert (await bench.get(f"/tokenizer_info?model={unknown}")).status == 404


async def test_health_and_head() -> None:
    async with running(two_models()) as bench:
        assert (await bench.get("/health")).json == {"status": "ok", "backends_up": 2}
        raw = b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(raw)
        head = await reader.read()
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        writer.close()


async def test_metrics_count_requests_once() -> None:
    async with running(two_models()) as bench:
        bench.engines[0].faults = [Fault("die", 3)]
        bench.gateway.pool.update(
            bench.gateway.pool.members["e1"].backend.model_copy(
                update={"models": ("m", "org/other")}
            )
        )
        await bench.post(CHAT, chat(stream=True))
        await bench.post(CHAT, chat(n=-1))
        for number in range(30):
            await bench.post(CHAT, chat(model=f"unknown-{number}"))
        reply = await bench.admin("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = reply.body.decode()
        # Names that clients make up are no labels.
        assert "unknown" not in page
        found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

        def value(name: str, **labels: str) -> float:
            return found[f"atoll_gateway_{name}", frozenset(labels.items())]

        kind = {"model": "m", "endpoint": "/v1/chat/completions"}
        assert value("requests_total", **kind, status="200") == 1
        assert value("failovers_total", model="m", when="after") == 1
        assert value("rejected_total", status="404") == 30
        assert value("backend_state", backend="e0", state="up") == 1
        assert value("request_seconds_count", **kind) == 1
        record = bench.records[0]
        assert value("tokens_total", model="m", kind="completion") == record.completion_tokens
        assert all(name.startswith("atoll_") for name, _ in found)


async def test_openapi_describes_every_endpoint() -> None:
    async with running(two_models()) as bench:
        document = (await bench.get("/openapi.json")).json
        assert document["openapi"].startswith("3.1")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
                "schema"
            ]
            name = schema["$ref"].rsplit("/", 1)[1]
            assert "model" in document["components"]["schemas"][name]["required"]
        for path, kind in (
            ("/v1/audio/speech", "application/json"),
            ("/v1/images/generations", "application/json"),
            ("/v1/audio/transcriptions", "multipart/form-data"),
        ):
            schema = document["paths"][path]["post"]["requestBody"]["content"][kind]["schema"]
            name = schema["$ref"].rsplit("/", 1)[1]
            assert "model" in document["components"]["schemas"][name]["required"]
        assert document["components"]["schemas"]["TranscriptionRequest"]["required"][-1] == "file"
        for path in ("/v1/models", "/health", "/metrics"):
            assert "get" in document["paths"][path]
        assert json.dumps(document)


async def test_backends_come_and_go() -> None:
    async with running(two_models()) as bench:
        status = (await bench.admin("/atoll/v1/status")).json
        assert status["status"] == "serving"
        assert [b["id"] for b in status["backends"]] == ["e0", "e1"]
        extra = ScriptedEngine(model="third")
        backend = {
            "id": "x",
            "url": await extra.start(),
            "models": ["third"],
            "metadata": {"api_key": "hidden", "note": "seen"},
        }
        assert (await bench.post(CHAT, chat(model="third"))).status == 404
        reply = await bench.admin("/atoll/v1/backends", backend)
        assert reply.status == 200
        assert b"hidden" not in reply.body
        assert b"seen" in reply.body
        assert (await bench.post(CHAT, chat(model="third"))).status == 200
        assert extra.seen[0].headers["authorization"] == "Bearer hidden"
        # The same again changes it.
        assert (
            await bench.admin("/atoll/v1/backends", backend | {"models": ["fourth"]})
        ).status == 200
        assert (await bench.post(CHAT, chat(model="third"))).status == 404
        assert (await bench.admin("/atoll/v1/backends/x", method="DELETE")).status == 200
        assert (await bench.admin("/atoll/v1/backends/x", method="DELETE")).status == 404
        assert (await bench.post(CHAT, chat(model="fourth"))).status == 404
        for bad in (
            b"",
            b"{}",
            b'{"id":"y","url":"ftp://x","models":["m"]}',
            b'{"id":"y","url":"http://x","models":[]}',
            b'{"id":"y","url":"http://x:0","models":["m"],"weight":-1}',
        ):
            reply = await bench.admin("/atoll/v1/backends", bad)
            assert reply.status == 400, bad
        assert (await bench.admin("/atoll/v1/nothing")).status == 404
        assert (await bench.admin("/atoll/v1/status", method="DELETE")).status == 405
        await extra.stop()


async def test_admin_token() -> None:
    async with running(two_models(), admin_token="yes") as bench:
        assert (await bench.get("/atoll/v1/status")).status == 401
        assert (await bench.get("/atoll/v1/status", "authorization: Bearer no\r\n")).status == 401
        assert (await bench.get("/atoll/v1/status", "authorization: Bearer yes\r\n")).status == 200
        assert (await bench.get("/metrics")).status == 401
        assert (await bench.get("/metrics", "authorization: Bearer yes\r\n")).status == 200
        assert (await bench.get("/v1/models")).status == 200
        assert (await bench.admin("/atoll/v1/status")).status == 200


async def test_the_admin_socket_is_its_users_alone_and_goes_with_the_gateway(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.sock"
    # What a process that was killed left behind is no obstacle.
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with running(two_models(), admin_socket=str(path)) as bench:
        assert bench.gateway.admin_socket == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await bench.admin("/health")).status == 200
        assert (await bench.admin(CHAT, chat())).status == 405
        with pytest.raises(InputError, match="another gateway"):
            async with running([], admin_socket=str(path)):
                pass
        assert (await bench.admin("/atoll/v1/status")).status == 200
    assert not path.exists()


async def test_where_it_is_administered_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed = tmp_path / "atoll" / "gateway-1.sock"
    killed.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(killed))
    async with running(two_models(), admin_socket=None) as bench:
        assert not killed.exists()
        assert bench.gateway.admin_socket == tmp_path / "atoll" / f"gateway-{bench.port}.sock"
        assert stat.S_IMODE((tmp_path / "atoll").stat().st_mode) == 0o700
        assert (await bench.admin("/atoll/v1/status")).status == 200
    async with running(two_models(), admin_socket="") as bench:
        assert bench.gateway.admin_socket is None


async def test_what_else_has_the_name_of_a_socket_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "atoll"
    folder.mkdir(mode=0o700)
    (folder / "gateway-1.sock").mkdir()
    (folder / "gateway-2.sock").write_text("notes")
    async with running(two_models(), admin_socket=None) as bench:
        assert (await bench.admin("/atoll/v1/status")).status == 200
        assert (folder / "gateway-1.sock").is_dir()
        assert (folder / "gateway-2.sock").read_text() == "notes"


def test_the_runtime_folder_must_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "atoll").write_text("")
    with pytest.raises(InputError, match="must belong to you alone"):
        runtime_dir()


def test_the_admin_token_is_not_in_what_settings_look_like() -> None:
    assert "hunter2" not in repr(GatewaySettings(admin_token="hunter2"))


async def test_status_asks_on_the_admin_socket() -> None:
    async with running(two_models()) as bench:
        fleet = FleetState(
            name="f",
            pid=1,
            url=f"http://127.0.0.1:{bench.port}",
            started_s=0.0,
            folder="",
            admin_socket=str(bench.gateway.admin_socket),
        )
        live = await ask_fleet(fleet)
        assert [b["id"] for b in live["gateway"]["backends"]] == ["e0", "e1"]
        assert await ask_fleet(fleet.model_copy(update={"admin_socket": ""})) == {}


async def test_a_port_for_prometheus_has_metrics_and_nothing_else() -> None:
    async with running(two_models(), metrics="127.0.0.1:0") as bench:
        assert bench.gateway.metrics_address is not None
        bench.port = bench.gateway.metrics_address[1]
        assert b"atoll_gateway_running" in (await bench.get("/metrics")).body
        assert (await bench.get("/health")).status == 200
        for path in ("/atoll/v1/status", "/v1/models", "/services/x"):
            assert (await bench.get(path)).status == 404
        assert (await bench.post(CHAT, chat())).status == 404
        assert (await bench.get("/metrics", method="DELETE")).status == 405


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "192.0.2.1:9464", "127.0.0.1", "x", "[::]:1"])
def test_a_port_for_prometheus_is_on_this_machine(address: str) -> None:
    with pytest.raises(InputError, match="metrics"):
        GatewaySettings.parse({"metrics": address})


@pytest.mark.parametrize(
    "claim",
    [
        {"metadata": {"provider": "ETH"}},
        {"url": "fabric://0123456789abcdef"},
    ],
)
async def test_a_configured_backend_has_no_provider_and_is_no_node(
    claim: dict[str, object],
) -> None:
    backend: dict[str, object] = {"id": "x", "url": "http://127.0.0.1:1", "models": ["x"]}
    async with running(two_models()) as bench:
        reply = await bench.admin("/atoll/v1/backends", backend | claim)
        assert reply.status == 400
        assert "x" not in bench.gateway.pool.members
    with pytest.raises(InputError, match="backends"):
        GatewayFile.parse({"backends": [backend | claim]})
