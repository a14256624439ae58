"""Programs at the dashboard: one description of everything, a key with each request, or the socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.console_inside import load_api
from atoll.runtime.http.http_client import HttpResponse, request
from atoll.runtime.openai import ApiError
from tests.dashboard.bench import Bench, error_code, open_bench


async def ask(
    bench: Bench, method: str, path: str, key: str | None, body: object = None, **headers: str
) -> HttpResponse:
    data = None if body is None else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await request(
        f"http://127.0.0.1:{bench.port}{path}",
        method=method,
        data=data,
        headers=given | ({} if data is None else {"content-type": "application/json"}),
        api_key=key,
    )


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_references, value.values()))
    if isinstance(value, list):
        return set().union(*map(_references, value))
    return set()


def test_the_document_has_every_request_with_its_types_and_no_loose_end() -> None:
    api = load_api()
    paths = api.document["paths"]
    for routes in api.routes.values():
        for route in routes:
            operation = paths[route.shown_path][route.method.lower()]
            assert operation["summary"] == route.summary
            assert ("requestBody" in operation) == (route.takes is not None)
            fine = operation["responses"][str(route.status)]["content"]
            assert fine.keys() == set(route.makes)
            known = {field["name"] for field in operation["parameters"]}
            assert known == {*route.names, *route.query.__struct_fields__}
    assert "post" in paths["/v1/chat/completions"]
    schemas = {f"#/components/schemas/{name}" for name in api.document["components"]["schemas"]}
    assert _references(api.document) <= schemas
    body = paths["/atoll/v1/fleets/{name}/file"]["put"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/NewFile")


def test_one_table_answers_every_request_once() -> None:
    api = load_api()
    every = [(r.method, r.path) for routes in api.routes.values() for r in routes]
    assert len(every) == len(set(every))
    for service, routes in api.routes.items():
        for route in routes:
            path = route.shown_path.replace("{", "").replace("}", "")
            assert api.find_service(route.method.encode(), path.encode()) == service
    assert api.find_service(b"DELETE", b"/atoll/v1/machines/lab/gpu1/drain") == "gateway"
    for method, asked, status in ((b"GET", b"/atoll/v1/no", 404), (b"PUT", b"/atoll/v1/me", 405)):
        with pytest.raises(ApiError) as refused:
            api.find_service(method, asked)
        assert refused.value.status == status


async def test_a_key_with_each_request_has_the_rights_of_its_role(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        said = await ask(bench, "GET", "/atoll/v1/session", "atoll-notebook")
        assert json.loads(said.body)["role"] == "member"
        assert "set-cookie" not in said.headers
        assert (await ask(bench, "GET", "/atoll/v1/me", "atoll-notebook")).status == 200
        # No page's token is needed, since no browser adds a key by itself.
        asked = {"id": "c41d", "approve": True}
        path = "/atoll/v1/fleets/lab/next"
        assert (await ask(bench, "POST", path, "atoll-finance", asked)).status == 403
        assert (await ask(bench, "POST", path, "atoll-notebook", asked)).status == 403
        assert (await ask(bench, "POST", path, "atoll-root", asked)).status != 403
        assert len(bench.dashboard.sessions) == 3


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("/session", "/atoll/v1/session"),
        ("/live", "/atoll/v1/live"),
        ("/api/gateway/usage?by=day", "/atoll/v1/usage?by=day"),
        ("/api/planner/fleets/lab%2Fa/file", "/atoll/v1/fleets/lab%2Fa/file"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
    ],
)
async def test_paths_of_before_say_where_to_ask(tmp_path: Path, before: str, now: str) -> None:
    async with open_bench(tmp_path, missing=True) as bench:
        for method in ("GET", "POST"):
            answer = await ask(bench, method, before, None)
            assert (answer.status, answer.headers["location"]) == (308, now)
        assert (await ask(bench, "GET", "/api/other", None)).status == 200  # a page


async def test_a_key_that_is_not_good_gets_nothing_and_is_counted(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        answers = [await ask(bench, "GET", "/atoll/v1/me", f"atoll-{n}") for n in range(12)]
        assert [answer.status for answer in answers] == [401] * 10 + [429] * 2
        assert len(bench.dashboard.sessions) == 0


async def test_a_key_that_is_revoked_is_out(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        assert (await ask(bench, "GET", "/atoll/v1/me", "atoll-notebook")).status == 200
        del bench.gateway.secrets["atoll-notebook"]
        answer = await ask(bench, "GET", "/atoll/v1/me", "atoll-notebook")
        assert (answer.status, error_code(answer)) == (401, "key_over")
        again = await ask(bench, "GET", "/atoll/v1/me", "atoll-notebook")
        assert (again.status, error_code(again)) == (401, "invalid_api_key")


async def test_a_page_of_another_origin_is_refused_with_a_key_too(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        answer = await ask(
            bench, "POST", "/atoll/v1/whatif", "atoll-root", {}, origin="http://evil.example"
        )
        assert (answer.status, error_code(answer)) == (403, "foreign_origin")


async def test_a_stranger_sends_no_large_body(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        path = "/atoll/v1/traces"
        large = "x" * 5_000_000
        answer = await ask(bench, "POST", path, "atoll-notebook", large)
        assert (answer.status, error_code(answer)) == (401, "login")
        assert (await ask(bench, "GET", "/atoll/v1/session", "atoll-notebook")).status == 200
        assert (await ask(bench, "POST", path, "atoll-notebook", large)).status != 401


@pytest.mark.parametrize("path", ["/atoll/v1/session", "/atoll/v1/me", "/openapi.json"])
async def test_the_user_who_runs_it_needs_no_login_on_the_socket(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        socket = tmp_path / "console.sock"
        await bench.dashboard.open_socket(socket)
        assert socket.stat().st_mode & 0o777 == 0o600
        answer = await request(f"http://console{path}", unix_socket=socket)
        assert answer.status == 200
        said = json.loads(answer.body)
        assert said.get("role", "admin") == "admin"
        nothing = await request("http://console/overview", unix_socket=socket)
        assert nothing.status == 404
