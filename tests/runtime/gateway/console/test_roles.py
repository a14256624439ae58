"""Every role at every request, as the reference says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.core.roles import ROLES, Role, may, read_role
from atoll.runtime.gateway.console.console import TABLE, Console
from atoll.runtime.gateway.console.console_caller import Caller
from atoll.runtime.gateway.console.route import ConsoleRoute, PagesContext, show
from atoll.runtime.gateway.dialects import DIALECTS
from atoll.runtime.gateway.openapi import document
from atoll.runtime.gateway.usage_writer import ENDPOINTS
from atoll.runtime.http.api_route import JSON, PREFIX
from atoll.runtime.http.http_request import Request
from atoll.runtime.openai import ApiError
from tests.runtime.gateway.console.site import open_site

PAGE = (Path(__file__).resolve().parents[4] / "docs/reference/http.md").read_text("utf-8")
CONTEXT = cast("PagesContext", SimpleNamespace())


def told() -> dict[tuple[str, str], Role]:
    """Return the least role of each request, by the table of the reference."""
    section = PAGE[PAGE.index("## Requests") : PAGE.index("## Gateway")]
    return {
        (method, path): "viewer" if role == "any" else read_role(role)
        for method, path, role in re.findall(r"^\| `(\w+) (\S+)` \| (\w+)", section, re.MULTILINE)
    }


def allowed_at(route: ConsoleRoute) -> set[Role]:
    """Return who may ask."""
    least = TOLD[route.method, route.shown_path]
    return {role for role in ROLES if may(role, least)}


TOLD = told()


@pytest.mark.parametrize("route", TABLE, ids=lambda r: f"{r.method} {r.path}")
@pytest.mark.parametrize("role", ROLES)
def test_every_role_at_every_request(route: ConsoleRoute, role: Role) -> None:
    allowed = role in allowed_at(route)
    path = route.shown_path.replace("{id}", "lab%2Fgpu1").encode()
    request = Request(route.method.encode(), path, {})
    if allowed:
        name = "lab/gpu1" if route.names else ""
        assert Console(CONTEXT).check(request, Caller(role)) == (route, name)
    else:
        with pytest.raises(ApiError) as refused:
            Console(CONTEXT).check(request, Caller(role))
        assert (refused.value.status, refused.value.code) == (403, "role_forbids")


@pytest.mark.parametrize("role", ROLES)
def test_what_is_not_there(role: Role) -> None:
    console = Console(CONTEXT)
    for path in (b"", b"nothing", b"me/", b"keys/", b"ME", b"%6de", b"me\xff", b"keys/\n"):
        with pytest.raises(ApiError) as missing:
            console.check(Request(b"GET", PREFIX.encode() + path, {}), Caller(role))
        assert missing.value.status in (404, 405), path
    for method in (b"HEAD", b"POST", b"TRACE", b"get", b"\xff"):
        with pytest.raises(ApiError) as wrong:
            console.check(Request(method, b"/atoll/v1/me", {}), Caller(role))
        assert (wrong.value.status, wrong.value.allow) == (405, "GET")


def test_a_name_may_have_slashes() -> None:
    table = (
        ConsoleRoute("POST", "machines/{id:path}/drain", "viewer", lambda _: show({}), ""),
        ConsoleRoute("GET", "machines/{id:path}", "viewer", lambda _: show({}), ""),
    )
    console = Console(CONTEXT, table)
    for path, name in (
        (b"machines/lab/gpu1/drain", "lab/gpu1"),
        (b"machines/lab%2Fgpu1/drain", "lab/gpu1"),
        (b"machines/a%20b/drain", "a b"),
    ):
        found = console.check(Request(b"POST", b"/atoll/v1/" + path, {}), Caller("viewer"))
        assert found == (table[0], name)


def test_it_is_all_in_the_description() -> None:
    paths: dict[str, Any] = document()["paths"]
    for route in TABLE:
        described = paths[route.shown_path][route.method.lower()]
        assert described["summary"] == route.summary
        assert {"401", "403", "404"} <= described["responses"].keys()


# At a gateway

_WAYS = {
    "socket": "admin",
    "token": "admin",
    "admin": "admin",
    "operator": "operator",
    "member": "member",
    "viewer": "viewer",
    "": None,
    "gone": None,
}
"""How somebody asks, and in which role that is."""


async def test_every_way_to_every_request(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.add("gone", role="admin")
        await site.add("operator", role="operator")
        await site.ask("socket", "DELETE", f"keys/{site.ids['gone']}")
        # Of every role that a request needs one, and the key that is another's.
        least = {TOLD[r.method, r.shown_path]: r for r in TABLE if r.makes[0] == JSON}
        routes = [*least.values(), *(r for r in TABLE if "keys/{id}" in r.path)]
        for route in routes:
            path = route.shown_path.removeprefix(PREFIX).replace("{id}", "none-such")
            body: object = None if route.method == "GET" else {}
            for way, role in _WAYS.items():
                allowed = role in allowed_at(route)
                reply = await site.ask(way, route.method, path, body)
                at = (way, route.method, route.path, reply.body)
                if role is None:
                    assert reply.status == 401, at
                elif not allowed:
                    assert (reply.status, reply.json["error"]["code"]) == (403, "role_forbids"), at
                elif role in ("operator", "member") and path == "keys/none-such":
                    # That one is not its own.
                    assert reply.status == 403, at
                else:
                    assert reply.status not in (401, 403, 405), at
                    assert reply.status < 500, at
                for said in ("operator", "member", "viewer"):
                    if role == "admin":
                        more = f"x-atoll-role: {said}\r\nx-atoll-owner: nobody\r\n"
                        reply = await site.ask(way, route.method, path, body, more)
                        allowed = said in allowed_at(route)
                        assert allowed or reply.status == 403, at
                    elif role is not None:
                        reply = await site.ask(
                            way, route.method, path, body, f"x-atoll-role: {said}\r\n"
                        )
                        assert reply.status == 403, at


async def test_metrics_are_for_admins(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        bench = site.place.bench
        statuses = {}
        for way in ("", "token", "admin", "member", "viewer"):
            statuses[way] = (await bench.get("/metrics", site.headers(way))).status
        assert statuses == {"": 401, "token": 200, "admin": 200, "member": 403, "viewer": 403}
        lowered = "x-atoll-role: viewer\r\n"
        assert (await bench.get("/metrics", site.headers("admin") + lowered)).status == 403
        assert (await bench.admin("/metrics", headers=lowered)).status == 403
        assert (await bench.admin("/metrics")).status == 200


async def test_a_header_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Whoever stands before us may have meant the other one."""
    async with open_site(tmp_path) as site:
        for twice in (
            "x-atoll-role: viewer\r\nx-atoll-role: admin\r\n",
            "x-atoll-role: member\r\nx-atoll-owner: a\r\nX-Atoll-Owner: b\r\n",
        ):
            assert (await site.ask("socket", "GET", "me", None, twice)).status == 400


async def test_without_a_token_strangers_find_nothing(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        gateway = site.place.bench.gateway
        gateway.configure(gateway.settings.model_copy(update={"admin_token": None}))
        for path in ("me", "status", "keys", "usage", "nothing"):
            assert (await site.ask("", "GET", path)).status == 403
            assert (await site.ask("token", "GET", path)).status == 403
        assert (await site.ask("admin", "GET", "status")).status == 200
        assert (await site.ask("member", "GET", "status")).status == 403
        assert (await site.ask("member", "GET", "me")).status == 200


async def test_a_viewer_asks_no_models(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        bench = site.place.bench
        bodies: dict[str, object] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
            "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
            "/v1/completions": {"prompt": "x"},
            "/v1/embeddings": {"input": "x"},
            "/v1/responses": {"input": "x"},
            "/v1/audio/speech": {"input": "x", "voice": "a"},
            "/v1/images/generations": {"prompt": "x"},
            "/tokenize": {"prompt": "x"},
            "/detokenize": {"tokens": [1]},
        }
        form = (
            b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x\r\ncontent-disposition: '
            b'form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n'
        )
        forms = {"/v1/audio/transcriptions", "/v1/audio/translations"}
        asked = {p.decode() for p in (*ENDPOINTS, *DIALECTS)}
        assert asked - forms == set(bodies)
        for path in sorted(asked):
            headers = site.headers("viewer")
            body = bodies.get(path, form)
            if path in forms:
                headers += "content-type: multipart/form-data; boundary=x\r\n"
            else:
                body = {"model": "m", **cast("dict[str, object]", body)}
            reply = await bench.post(path, body, headers)
            assert reply.status == 403, (path, reply.body)
            if not path.startswith("/v1/messages"):
                assert reply.json["error"]["code"] == "role_forbids", path
        reply = await bench.get("/services/x/y", site.headers("viewer"))
        assert (reply.status, reply.json["error"]["code"]) == (403, "role_forbids")
        assert (await bench.get("/v1/models", site.headers("viewer"))).status == 200
        for name in ("member", "admin"):
            body = {"model": "m", **cast("dict[str, object]", bodies["/v1/chat/completions"])}
            reply = await bench.post("/v1/chat/completions", body, site.headers(name))
            assert reply.status == 200
        assert not bench.gateway.relays


async def test_who_asks(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        me = (await site.ask("member", "GET", "me")).json
        assert me == {
            "id": site.ids["member"],
            "name": "member",
            "owner": "ada@lab.example",
            "role": "member",
            "keys_needed": True,
            "accounts": True,
        }
        reply = await site.ask("socket", "GET", "me")
        assert (reply.json["id"], reply.json["role"]) == (None, "admin")
        assert reply.headers["cache-control"] == "no-store"
        more = "x-atoll-role: viewer\r\nx-atoll-owner: bo\r\n"
        lowered = (await site.ask("admin", "GET", "me", None, more)).json
        assert (lowered["id"], lowered["role"], lowered["owner"]) == (None, "viewer", "bo")
