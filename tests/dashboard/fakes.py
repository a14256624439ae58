"""A gateway and a planner that are not there: servers on loopback that answer as the contract says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs, unquote

from atoll.core.roles import Role, may
from atoll.runtime.http.handlers import Answer, EventStream, HandlerServer, Response
from atoll.runtime.http.http_server import ConnectionLimits, Request
from atoll.runtime.openai import ApiError
from tests.dashboard import fake_data as data
from tests.dashboard.fake_data import Json

_WORDS = (
    "The lighthouse keeper climbed the stairs as she did every evening, counting them without "
    "noticing. Far out a ship turned its lamp towards the bay. She lit the wick, wound the clockwork "
    "and wrote the hour into her book: *calm sea, wind from the west*.\n\n"
    "1. The lamp burns.\n2. The ship is safe.\n\n```python\nprint('good night')\n```\n"
)


def answer_json(body: object, status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status, headers=(("cache-control", "no-store"),))


def forbid() -> ApiError:
    return ApiError(403, "this role may not do that", kind="permission_error", code="role_forbids")


class FakeService:
    """What both have in common; `seen` are the requests that came."""

    def __init__(self, *, interval_s: float = 2.0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(16)
        self.interval_s = interval_s
        self.seen: list[Request] = []
        self.live_count = 0
        """Connections to `live`, ever."""
        self.live_open = 0
        self.started_s = time.time()
        self.renames: dict[str, str] = {}
        """Texts of answers that are told as others: what is called "gpu1" here may be called anything."""
        self.server = HandlerServer(self.answer, ConnectionLimits(body_bytes=64 * 2**20))
        self.url = ""

    async def start(self, port: int = 0) -> None:
        host, port = await self.server.start("127.0.0.1", port)
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        await self.server.close()

    async def answer(self, request: Request) -> Answer:
        self.seen.append(request)
        path = unquote(request.path.decode("latin-1"))
        for old, new in self.renames.items():
            path = path.replace(new, old)
        answer = await self.route(request, path)
        if not self.renames:
            return answer
        if isinstance(answer, EventStream):
            return EventStream(self._rename_pieces(answer.pieces), answer.headers)
        if isinstance(answer, Response) and answer.content_type.startswith("application/json"):
            body = self._rename(answer.body)
            return Response(body, answer.status, answer.content_type, answer.headers)
        return answer

    def _rename(self, text: bytes) -> bytes:
        for old, new in self.renames.items():
            text = text.replace(json.dumps(old).encode(), json.dumps(new).encode())
        return text

    async def _rename_pieces(
        self, pieces: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield self._rename(piece)

    async def route(self, request: Request, path: str) -> Answer:
        raise NotImplementedError

    def snapshot(self) -> tuple[str, Json]:
        raise NotImplementedError

    async def live(self) -> AsyncGenerator[bytes, None]:
        self.live_count += 1
        self.live_open += 1
        try:
            while True:
                name, body = self.snapshot()
                yield f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()
                await asyncio.sleep(self.interval_s)
        finally:
            self.live_open -= 1


class FakeGateway(FakeService):
    """A gateway with three models on six machines, keys and a month of usage."""

    def __init__(
        self,
        *,
        interval_s: float = 2.0,
        keys_needed: bool = True,
        accounts: bool = True,
        token_s: float = 0.03,
    ) -> None:
        super().__init__(interval_s=interval_s)
        self.keys_needed = keys_needed
        self.accounts = accounts
        self.token_s = token_s
        self.version = 17
        self.machines = data.make_machines(self.started_s)
        self.keys = data.make_keys(self.started_s)
        self.secrets = {f"atoll-{key['name'].replace(' ', '-')}": key["id"] for key in self.keys}
        """Ids of keys by their text: "atoll-notebook" is one."""
        root = data.make_key(9, "root", self.started_s, owner="root@lab.example", role="admin")
        self.keys.append(root)
        self.secrets["atoll-root"] = root["id"]
        self.chats_cancelled = 0
        self.chats_done = 0

    def snapshot(self) -> tuple[str, Json]:
        return "snapshot", data.make_snapshot(self.machines, self.version, self.started_s)

    # Who asks

    def _asker(self, request: Request) -> Json:
        authorization = request.headers.get(b"authorization", b"").decode()
        base: Json = {"keys_needed": self.keys_needed, "accounts": self.accounts}
        text = authorization.removeprefix("Bearer ")
        if text == self.token:
            role = request.headers.get(b"x-atoll-role", b"admin").decode()
            owner = request.headers.get(b"x-atoll-owner", b"").decode() or None
            return {"id": None, "name": None, "owner": owner, "role": role, **base}
        key = next((k for k in self.keys if k["id"] == self.secrets.get(text)), None)
        if key is None or key["state"] != "active":
            raise ApiError(401, "invalid key", kind="authentication_error", code="invalid_api_key")
        return {
            "id": key["id"],
            "name": key["name"],
            "owner": key["owner"],
            "role": key["role"],
            **base,
        }

    async def route(self, request: Request, path: str) -> Answer:
        if path.startswith("/v1/"):
            return await self._public(request, path)
        asker = self._asker(request)
        rest = path.removeprefix("/atoll/v1/")
        if rest == "me":
            return answer_json(asker)
        if rest == "live":
            return EventStream(self.live())
        if rest == "snapshot":
            return answer_json(self.snapshot()[1])
        if rest == "models":
            return answer_json({"version": self.version, "models": data.make_models(self.machines)})
        if rest.startswith("machines"):
            return self._machines(request, asker, rest)
        if rest.startswith("keys"):
            return self._keys(request, asker, rest)
        if rest == "usage":
            return self._usage(request, asker)
        return self._past(request, rest)

    def _past(self, request: Request, rest: str) -> Answer:
        """What was, and what it cost."""
        if rest == "budgets":
            return answer_json({"budgets": data.BUDGETS})
        if rest == "history":
            query = {k: v[0] for k, v in parse_qs(request.query.decode()).items()}
            return answer_json(data.make_history_curves(query))
        if rest == "requests":
            return answer_json({"requests": data.make_requests(time.time())})
        if rest.startswith("requests/"):
            found = data.make_request(rest.removeprefix("requests/"), time.time())
            if found is None:
                raise ApiError(404, "no request of this id is kept", code="not_found")
            return answer_json(found)
        raise ApiError(404, f"nothing at {rest}", code="not_found")

    def _machines(self, request: Request, asker: Json, rest: str) -> Answer:
        if rest == "machines":
            return answer_json(
                {"version": self.version, "machines": self.machines, "pipelines": data.PIPELINES}
            )
        found = re.fullmatch(r"machines/(.+)/drain", rest)
        machine = next((m for m in self.machines if found and m["id"] == found[1]), None)
        if machine is None:
            raise ApiError(404, "there is no such machine", code="not_found")
        if asker["role"] != "admin":
            raise forbid()
        if request.method == b"DELETE":
            machine.update(state="up", drained=False)
        else:
            if json.loads(request.body or b"{}").get("confirm") != machine["name"]:
                raise ApiError(400, "confirm with the machine's name", param="confirm")
            machine.update(state="drained", drained=True)
        self.version += 1
        return answer_json(machine)

    def _keys(self, request: Request, asker: Json, rest: str) -> Answer:
        if not self.accounts:
            raise ApiError(404, "there are no accounts", code="no_accounts")
        own = [k for k in self.keys if self._is_own(k, asker)]
        if request.method == b"GET":
            shown = own if asker["role"] == "member" else self.keys
            return answer_json({"keys": [{**k, "own": k in own} for k in shown]})
        body = json.loads(request.body or b"{}")
        if request.method == b"POST":
            if asker["role"] != "admin":
                raise forbid()
            if not body.get("name"):
                raise ApiError(400, "a name is needed", param="name")
            if any(not isinstance(body.get(name, ""), str) for name in ("name", "owner", "role")):
                raise ApiError(400, "owner: text is needed", param="owner")
            key = data.make_key(len(self.keys) + 10, body.pop("name"), time.time(), **body)
            key["used"] = {"today": {"tokens": 0}, "month": {"tokens": 0}, "total": {"tokens": 0}}
            text = f"atoll-{secrets.token_urlsafe(24)}"
            self.keys.append(key)
            self.secrets[text] = key["id"]
            return answer_json({"key": text, **key, "own": self._is_own(key, asker)}, 201)
        key = next((k for k in self.keys if f"keys/{k['id']}" == rest), {})
        if not key:
            raise ApiError(404, "there is no such key", code="not_found")
        mine = key in own and asker["role"] == "member" and request.method == b"DELETE"
        if asker["role"] != "admin" and not mine:
            raise forbid()
        if request.method == b"DELETE":
            key.update(state="revoked", revoked_s=time.time())
        else:
            key.update(body)
        return answer_json(key)

    def _is_own(self, key: Json, asker: Json) -> bool:
        if asker["owner"]:
            return bool(key["owner"] == asker["owner"])
        return bool(key["id"] == asker["id"])

    def _usage(self, request: Request, asker: Json) -> Answer:
        query = {k: v[0] for k, v in parse_qs(request.query.decode()).items()}
        by = query.get("by", "day,model").split(",")
        keys = [k for k in self.keys if asker["role"] != "member" or self._is_own(k, asker)]
        rows = data.make_usage(by, keys, time.time())
        if query.get("format") == "csv":
            lines = [",".join(rows[0])] if rows else []
            lines += [",".join(str(value) for value in row.values()) for row in rows]
            named = (("content-disposition", 'attachment; filename="usage.csv"'),)
            text = "\r\n".join(lines) + "\r\n"
            return Response(text.encode(), content_type="text/csv; charset=utf-8", headers=named)
        return answer_json({"by": by, "rows": rows})

    # Models

    async def _public(self, request: Request, path: str) -> Answer:
        if self.keys_needed and self._asker(request)["role"] == "viewer":
            raise forbid()
        if path == "/v1/models":
            return answer_json(
                {
                    "object": "list",
                    "data": [{"id": name, "object": "model"} for name in data.MODELS],
                }
            )
        if path != "/v1/chat/completions":
            raise ApiError(404, f"nothing at {path}", code="not_found")
        body = json.loads(request.body)
        first = {
            "x-atoll-node": "gpu1",
            "x-atoll-model": str(body["model"]),
            "x-atoll-provider": "ETH",
        }
        headers = tuple(first.items())
        if not body.get("stream"):
            message = {"role": "assistant", "content": _WORDS}
            return Response(
                json.dumps(
                    {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
                ).encode(),
                headers=headers,
            )
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            return EventStream(self._call_tool(str(body["model"])), headers)
        told = request.headers.get(b"x-atoll-events") == b"1"
        return EventStream(self._chat(str(body["model"]), told=told), headers)

    async def _call_tool(self, model: str) -> AsyncGenerator[bytes, None]:
        """Stream a call of a tool, bit by bit."""
        first = {"id": "call_7", "index": 0, "function": {"name": "get_weather", "arguments": ""}}
        yield _chunk(model, {"tool_calls": [{"type": "function", **first}]})
        for piece in ('{"place": ', '"Zurich"}'):
            yield _chunk(model, {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        yield _chunk(model, {}, finish_reason="tool_calls")
        yield b"data: [DONE]\n\n"

    async def _chat(self, model: str, *, told: bool) -> AsyncGenerator[bytes, None]:
        """Stream an answer; a third of the way another node goes on with it."""
        words = re.findall(r"\S+\s*", _WORDS)
        nodes = [m for m in self.machines if m["services"][0]["model"] == model] or self.machines
        done = False
        try:
            for at, word in enumerate(words):
                attempt = 2 if at >= len(words) // 3 else 1
                if told and at in (0, len(words) // 3):
                    node = nodes[(attempt - 1) % len(nodes)]
                    event = {
                        "event": "node",
                        "node": node["name"],
                        "backend": node["id"],
                        "provider": node["provider"],
                        "attempt": attempt,
                    }
                    yield f": atoll {json.dumps(event)}\n\n".encode()
                yield _chunk(model, {"content": word})
                await asyncio.sleep(self.token_s)
            usage = {
                "prompt_tokens": 23,
                "completion_tokens": len(words),
                "total_tokens": 23 + len(words),
            }
            yield _chunk(model, {}, finish_reason="stop", usage=usage)
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            self.chats_done += done
            self.chats_cancelled += not done


def _chunk(model: str, delta: Json, usage: Json | None = None, **choice: Any) -> bytes:
    body: Json = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}],
    }
    if usage is not None:
        body["usage"] = usage
    return f"data: {json.dumps(body)}\n\n".encode()


class FakeDesk(FakeService):
    """A planner with an operated fleet, an example, what-if and traces."""

    def __init__(self, *, interval_s: float = 5.0, step_s: float = 0.2) -> None:
        super().__init__(interval_s=interval_s)
        self.step_s = step_s
        self.next: Json | None = data.make_next(self.started_s)
        self.traces = list(data.TRACES)
        self.plans: set[str] = set()
        self.roles: list[Role] = []
        """Who asked, as `seen` has what."""
        self.ready = asyncio.Event()
        """Whether it has started, as it has at first."""
        self.ready.set()
        self.owners: list[str] = []
        self.file = data.FLEET_FILE

    def snapshot(self) -> tuple[str, Json]:
        return "fleets", self._fleets()

    def _fleets(self) -> Json:
        return {
            "fleets": [
                {
                    "name": "lab",
                    "kind": "operated",
                    "up": True,
                    "controller": "atoll operate of process 7 on gpu0",
                    "url": "http://127.0.0.1:8080",
                    "since_s": self.started_s - 86000.0,
                    "usd_per_hour": 11.6,
                    "errors": [],
                },
                {
                    "name": "quickstart",
                    "kind": "example",
                    "title": "Three models on rented mid-range GPUs: plans in seconds.",
                },
                {"name": "fleet.yaml", "kind": "file"},
            ]
        }

    async def answer(self, request: Request, role: Role = "admin", owner: str = "") -> Answer:
        await self.ready.wait()
        self.owners.append(owner)
        self.roles.append(role)
        return await super().answer(request)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        await self.ready.wait()
        async with contextlib.aclosing(self._rename_pieces(self.live())) as pieces:
            async for piece in pieces:
                yield piece

    async def route(self, request: Request, path: str) -> Answer:
        role = self.roles[-1]
        if request.method != b"GET" and not may(role, "member"):
            raise forbid()
        rest = path.removeprefix("/atoll/v1/")
        if rest == "catalog/models":
            return answer_json({"models": data.MODELS_TO_DEPLOY})
        if rest.startswith("fleets"):
            return self._fleet(request, role, rest)
        if rest == "whatif":
            return EventStream(self._whatif(json.loads(request.body)))
        if rest == "simulate":
            return EventStream(self._simulate(json.loads(request.body)))
        if rest.startswith("traces"):
            return self._traces(request, rest)
        if rest.startswith("reports/"):
            return Response(
                data.REPORT.encode(),
                content_type="text/html; charset=utf-8",
                headers=(("cache-control", "no-store"),),
            )
        raise ApiError(404, f"nothing at {path}", code="not_found")

    def _fleet(self, request: Request, role: Role, rest: str) -> Answer:
        if rest == "fleets":
            return answer_json(self._fleets())
        _, name, *kind = rest.split("/")
        fleet = next((f for f in self._fleets()["fleets"] if f["name"] == name), None)
        if fleet is None:
            raise ApiError(404, f"no fleet {name}", code="not_found")
        match "/".join(kind):
            case "":
                return answer_json({**fleet, "instances": self._instances(), "stand_ins": {}})
            case "plan":
                if name == "lab" or name in self.plans:
                    return answer_json(
                        {
                            "plan": {**data.make_plan(), "fleet": name},
                            "made_s": self.started_s - 7300,
                        }
                    )
                return answer_json(
                    {"plan": None, "reason": "no plan was made of it here yet", "made_s": None}
                )
            case "history":
                return answer_json(
                    {"events": data.make_history(time.time()) if name == "lab" else []}
                )
            case "dials":
                return answer_json({**data.DIALS, "fleet": name})
            case "next":
                return self._approve(request, role, name)
            case "file":
                return self._file(request, role, name)
            case "invitations":
                return self._invitations(request)
            case other if other.startswith("logs"):
                return self._logs(request, other)
        raise ApiError(404, "nothing there", code="not_found")

    def _invitations(self, request: Request) -> Answer:
        if request.method != b"POST":
            return answer_json({"invitations": data.INVITATIONS})
        asked = json.loads(request.body)
        return answer_json(
            {
                "name": asked["name"],
                "line": f"atoll join --fabric TOKEN --name {asked['name']}",
                "expires_s": self.started_s + 86400.0 * asked["days"],
                "hubs": ["127.0.0.1:7000"],
                "only_here": True,
            }
        )

    def _file(self, request: Request, role: Role, name: str) -> Answer:
        if request.method == b"PUT":
            if not may(role, "operator"):
                raise forbid()
            self.file = json.loads(request.body)["file"]
            return answer_json({"fleet": name, "version": "b", "changed": "chat changed (rate)"})
        return answer_json(
            {
                "fleet": name,
                "file": self.file,
                "version": "a",
                "services": data.SERVICES,
                "can_change": name == "lab",
                "earlier": [{"version": "0ld", "replaced_s": self.started_s - 300.0}],
            }
        )

    def _approve(self, request: Request, role: Role, name: str) -> Answer:
        if request.method == b"POST":
            if not may(role, "operator"):
                raise forbid()
            body = json.loads(request.body)
            if self.next is None or body.get("id") != self.next["id"]:
                raise ApiError(409, "the change is another by now", code="changed")
            self.next["state"] = "applying" if body.get("approve") else "refused"
        return answer_json({"next": self.next if name == "lab" else None})

    def _logs(self, request: Request, path: str) -> Answer:
        if path == "logs":
            return answer_json({"logs": ["chat-1", "gateway"], "errors": []})
        if b"follow=1" in request.query:
            return EventStream(self._log(path[5:]))
        return answer_json({"instance": path[5:], "text": "it has begun\nit is ready"})

    async def _log(self, name: str) -> AsyncGenerator[bytes, None]:
        """Tell lines of before, and one more after a moment."""
        for lines in ([f"{name} starts", "WARNING: the cache is cold"], [f"{name} is ready"]):
            yield f"event: lines\ndata: {json.dumps({'lines': lines})}\n\n".encode()
            await asyncio.sleep(self.step_s)
        while True:
            await asyncio.sleep(5.0)
            yield b": \n\n"

    def _instances(self) -> list[Json]:
        return [
            {
                "instance": each["id"],
                "service": each["service"],
                "target": "skypilot",
                "state": "serving",
                "since_s": self.started_s - 7000.0,
                "ends_s": None,
                "usd_per_hour": each["usd_per_hour"],
                "hosts": [f"10.0.0.{at + 4}"],
                "reason": "",
            }
            for at, each in enumerate(data.make_plan()["instances"])
        ]

    async def _progress(self, *texts: str) -> AsyncGenerator[bytes, None]:
        for at, text in enumerate(texts):
            share = {"text": text, "share": at / len(texts)}
            yield f"event: progress\ndata: {json.dumps(share)}\n\n".encode()
            await asyncio.sleep(self.step_s)

    async def _whatif(self, body: Json) -> AsyncGenerator[bytes, None]:
        texts = ("reading the fleet", "planning now", "planning then", "simulating both")
        async for piece in self._progress(*texts):
            yield piece
        factor = max([1.0, *body.get("demand", {}).values()])
        self.plans.add(str(body.get("fleet")))
        now, then = data.make_plan(), data.make_plan(factor)
        budget = body.get("budget_usd_per_hour")
        served = 1.0 if not budget else min(1.0, budget / then["usd_per_hour"])
        more = then["usd_per_hour"] - now["usd_per_hour"]
        known = {i["id"] for i in now["instances"]}
        starts = [i for i in then["instances"] if i["id"] not in known]
        result = {
            "now": {
                "plan": now,
                "kept": {"chat": 0.97, "small": 0.98},
                "usd_per_hour": now["usd_per_hour"],
                "served": 1.0,
            },
            "then": {
                "plan": then,
                "kept": {"chat": 0.96, "small": 0.97},
                "usd_per_hour": then["usd_per_hour"],
                "served": served,
            },
            "diff": {
                "starts": starts,
                "goes": [],
                "stays": len(known),
                "text": [f"start {i['id']} on {i['layout']}" for i in starts],
            },
            "verdict": f"costs ${more:.2f}/h more and keeps every promise"
            if more
            else "changes nothing",
            "fleet_file": "name: lab\nservices:\n  - name: chat\n    model: qwen3-32b\n",
            "seconds": 4 * self.step_s,
        }
        yield f"event: result\ndata: {json.dumps(result)}\n\n".encode()

    async def _simulate(self, body: Json) -> AsyncGenerator[bytes, None]:
        async for piece in self._progress("reading the trace", "simulating", "drawing the report"):
            yield piece
        times = [10.0 * at for at in range(60)]
        spread = {"p50": 0.4, "p95": 1.2, "p99": 2.1}
        result = {
            "report": "r-77aa",
            "kept": {"chat": 0.97, "small": 0.98},
            "requests": 2400,
            "usd_per_hour": 11.6,
            "services": [
                {
                    "name": name,
                    "requests": 1200,
                    "kept": 0.97,
                    "ttft_s": spread,
                    "tpot_s": {"p50": 0.03, "p95": 0.05, "p99": 0.08},
                    "tokens_per_s": 830.0,
                }
                for name in ("chat", "small")
            ],
            "timeline": {
                "t_s": times,
                "running": [20 + (at * 7) % 13 for at in range(60)],
                "ttft_s": [0.3 + 0.02 * ((at * 5) % 11) for at in range(60)],
            },
            "seconds": 3 * self.step_s,
        }
        del body
        yield f"event: result\ndata: {json.dumps(result)}\n\n".encode()

    def _traces(self, request: Request, rest: str) -> Answer:
        if request.method == b"POST":
            name = unquote(request.headers.get(b"x-atoll-filename", b"trace.csv").decode("latin-1"))
            lines = max(0, request.body.count(b"\n") - 1)
            trace = {
                "id": f"u-{secrets.token_hex(2)}",
                "name": name,
                "kind": "uploaded",
                "requests": lines,
                "seconds": 3600.0,
                "requests_per_s": lines / 3600.0,
                "input_mean": 1100.0,
                "output_mean": 200.0,
                "models": ["chat"],
                "timeline": [[60.0 * at, 5.0 + at % 3] for at in range(60)],
            }
            self.traces.append(trace)
            return answer_json(trace, 201)
        if request.method == b"DELETE":
            self.traces = [t for t in self.traces if f"traces/{t['id']}" != rest]
            return answer_json({})
        return answer_json({"traces": self.traces})
