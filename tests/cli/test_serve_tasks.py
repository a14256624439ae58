"""`atoll tasks serve` and `atoll serve` before anything is started, and what they say once it runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.cli.serving_loop import list_first_requests
from atoll.cli.status import draw_fleet
from atoll.report.terminal import console
from atoll.runtime.local.fleet_state import EndpointState, FleetState, NodeState

pytest.importorskip("onnxruntime", reason="needs the extra 'components'")
ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
MOUTH = "services: {mouth: {}}\nexecutors: {one: {components: [hibari]}}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("services: {a: {}}\nexecutors: {x: {components: [hibary]}}", "did you mean hibari?", 2),
        ("services: {a: {}}\nexecutors: {x: {components: [hibari], device: tpu}}", "device", 2),
        ("[]", "a tasks file is a mapping", None),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    text: str, reason: str, line: int | None, capsys: Captured
) -> None:
    Path("tasks.yaml").write_text(text)
    assert cli.run(["tasks", "serve", "tasks.yaml"]) != 0
    (said,) = capsys.readouterr().err.splitlines()
    assert reason in said
    assert f"tasks.yaml:{line}" in said or line is None
    assert "bug" not in said


def test_a_taken_port_and_a_missing_file_are_said_before_anything_starts(
    capsys: Captured,
) -> None:
    Path("tasks.yaml").write_text(MOUTH)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["tasks", "serve", "tasks.yaml", "--port", str(port)]) != 0
    (said,) = capsys.readouterr().err.splitlines()
    assert str(port) in said
    for command in (["none.yaml"], ["tasks.yaml", "--log", "no/such/folder/x"]):
        assert cli.run(["tasks", "serve", *command]) != 0
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "services: {a: {tasks: {chat: 'nowhere.at:All'}}}\nexecutors: {x: {components: [hibari]}}",
        "services: {a: {}}\nexecutors: {x: {components: [hibari, 'nowhere.at:All']}}",
    ],
)
def test_code_that_cannot_be_loaded_is_said_before_anything_starts(
    text: str, capsys: Captured
) -> None:
    Path("tasks.yaml").write_text(text)
    assert cli.run(["tasks", "serve", "tasks.yaml", "--port", "0"]) != 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in said
    assert "(fix: " in said
    assert "bug" not in said


def fleet() -> FleetState:
    def node(name: str, held: str) -> NodeState:
        return NodeState(
            process=name,
            instance=name,
            node="n0",
            node_type="cpu",
            start=0,
            end=1,
            log="",
            holds=held,
        )

    server = EndpointState(
        id="graph-server",
        service="a, b",
        url="http://127.0.0.1:2",
        kind="tasks",
        weight=1.0,
        nodes=(node("x-0", "hibari"),),
        answers={"a": ("/v1/audio/speech",), "b": ("/v1/audio/speech", "/v1/embeddings")},
    )
    plain = server.model_copy(
        update={
            "id": "chat-1",
            "service": "chat",
            "kind": "atoll",
            "nodes": (node("chat-1/n0", ""),),
            "answers": {},
        }
    )
    return FleetState(
        name="f",
        pid=1,
        url="http://127.0.0.1:1",
        started_s=0.0,
        folder="",
        endpoints=(server, plain),
    )


def test_what_to_try_first_names_real_models_and_paths() -> None:
    speech, embed, chat = list_first_requests(fleet())
    assert "/v1/audio/speech" in speech
    assert '"model": "a"' in speech
    assert "/v1/embeddings" in embed
    assert '"model": "b"' in embed
    assert "/v1/chat/completions" in chat
    assert '"model": "chat"' in chat


def test_executors_show_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = console()
    live = {"graph-server": {"executors": [{"id": "x-0", "connected": False}]}, "gateway": {}}
    with out.capture() as seen:
        out.print(draw_fleet(fleet(), live))
    text = seen.get()
    assert "layers or parts" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["x-0", "cpu", "hibari", "silent"] in [row[:4] for row in rows]
    assert ["chat-1/n0", "cpu", "[0,", "1)", "no", "answer"] in [row[:6] for row in rows]
    with out.capture() as seen:
        out.print(draw_fleet(fleet().model_copy(update={"endpoints": fleet().endpoints[:1]}), None))
    assert "parts" in seen.get()
    assert "layers" not in seen.get()


def test_the_example_is_a_tasks_file() -> None:
    from atoll.runtime.task_fleet.parts_file import read_tasks_file

    found = read_tasks_file(ROOT / "examples" / "tasks" / "assistant.yaml")
    assert set(found.services[0].tasks) == {
        *("chat", "transcriptions", "speech", "images", "embeddings")
    }
    assert found.services[0].options == {"voice_activity": True, "image_sizes": ["128x128"]}
