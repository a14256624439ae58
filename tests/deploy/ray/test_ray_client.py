"""Requests to the head of a Ray cluster, and what is made of answers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.ray.ray_client import HttpRayClient
from atoll.deploy.target import DeployError


class Head:
    """Answers by method and path; `asked` is what came."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, str]] = {}
        self.asked: list[tuple[str, str, bytes, str | None]] = []
        head = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                head.asked.append(
                    (self.command, self.path, body, self.headers.get("Authorization"))
                )
                where = (self.command, self.path.partition("?")[0])
                status, text = head.answers.get(where, (404, "404: Not Found"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - as the library calls them

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def listed(*records: dict[str, str]) -> tuple[int, str]:
    return 200, json.dumps({"result": True, "data": {"result": {"result": list(records)}}})


def test_lists_are_asked_for_whole(head: Head) -> None:
    head.answers["GET", "/api/v0/nodes"] = listed({"node_id": "a"})
    head.answers["GET", "/api/v0/placement_groups"] = listed()
    head.answers["GET", "/api/v0/actors"] = listed({"actor_id": "b"})
    head.answers["GET", "/api/jobs/"] = (
        200,
        json.dumps([{"type": "SUBMISSION", "submission_id": "j"}, {"type": "DRIVER"}]),
    )
    client = HttpRayClient(head.url)
    assert client.nodes() == [{"node_id": "a"}]
    assert client.groups() == []
    assert client.actors() == [{"actor_id": "b"}]
    assert [job["submission_id"] for job in client.jobs()] == ["j"]
    paths = [path for _, path, _, _ in head.asked]
    assert paths[0] == "/api/v0/nodes?detail=1&limit=10000"
    assert "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE" in paths[2]


def test_jobs_are_submitted_stopped_and_read(head: Head, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    client = HttpRayClient(head.url, token_file=str(token))
    head.answers["PUT", "/api/packages/gcs/p.zip"] = (200, "")
    head.answers["POST", "/api/jobs/"] = (200, "{}")
    head.answers["POST", "/api/jobs/j/stop"] = (200, '{"stopped": true}')
    head.answers["GET", "/api/jobs/j/logs"] = (200, '{"logs": "words"}')
    head.answers["GET", "/api/v0/logs/file"] = (200, "last line\n")
    head.answers["DELETE", "/api/jobs/j"] = (200, '{"deleted": true}')
    assert client.upload("p.zip", b"content") == "gcs://p.zip"
    client.submit({"submission_id": "j"})
    client.stop("j")
    assert client.job_log("j") == "words"
    assert client.tail("id", "f.log", 3) == "last line\n"
    client.forget("j")
    assert head.asked[0][2] == b"content"
    assert json.loads(head.asked[1][2]) == {"submission_id": "j"}
    assert head.asked[4][1] == "/api/v0/logs/file?node_id=id&filename=f.log&lines=3"
    assert {key for *_, key in head.asked} == {"Bearer t0ken"}
    # What is not there need not end, and has written nothing.
    client.stop("none")
    client.forget("none")
    assert client.job_log("none") == ""


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((200, "<html>"), "unreachable", "is no Ray with a dashboard"),
        ((200, '{"data": null}'), "unreachable", "is no Ray with a dashboard"),
        ((404, "404: Not Found"), "settings", r"refuses GET /api/v0/nodes \(404\).*ray\[default\]"),
        ((401, "no token"), "settings", r"refuses access \(401\): no token .*token_file"),
        ((500, "Traceback:\n a\nE: why\n"), "unreachable", r"\(500\): E: why$"),
    ],
)
def test_refusals_are_one_line(head: Head, answer: tuple[int, str], kind: str, words: str) -> None:
    head.answers["GET", "/api/v0/nodes"] = answer
    with pytest.raises(DeployError, match=words) as caught:
        HttpRayClient(head.url).nodes()
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.jobs(), lambda client: client.submit({}), lambda client: client.nodes()],
)
def test_a_head_that_is_not_there_is_one_line(ask: Callable[[HttpRayClient], object]) -> None:
    head = Head()
    head.server.server_close()
    with pytest.raises(DeployError, match=r"Ray does not answer at http.* refused") as caught:
        ask(HttpRayClient(head.url))
    assert caught.value.kind == "unreachable"
    assert "--ray-address" in str(caught.value)


def test_a_token_that_cannot_be_read_is_named(head: Head, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"cannot read .*nothing"):
        HttpRayClient(head.url, token_file=str(tmp_path / "nothing")).nodes()


def test_odd_lists_of_jobs_are_no_list(head: Head) -> None:
    head.answers["GET", "/api/jobs/"] = (200, "{}")
    with pytest.raises(DeployError, match="no Ray"):
        HttpRayClient(head.url).jobs()
