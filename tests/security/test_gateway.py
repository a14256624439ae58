"""What clients, and nodes that want their requests, try against a gateway with keys."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import InputError
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.tunnel.tunnel_server import IncomingCall
from atoll.runtime.accounts.api_keys import ApiKey, NewKey, make_key, matches, read_bearer
from atoll.runtime.federation.members import Members
from atoll.runtime.federation.upstreams import FarUpstreamPool, _elsewhere, probe
from atoll.runtime.gateway.settings import GatewayLimits
from atoll.runtime.join.bridge import reachable
from atoll.runtime.openai import read_request
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers
from atoll.runtime.pool.policy import ModelOffer, Policy
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import SilentLog
from tests.runtime.federation.live import site
from tests.runtime.federation.test_keys import bearer, with_keys
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT, chat, running
from tests.runtime.waiting import until

pytest.importorskip("sqlalchemy", reason="needs the extra 'accounts'")


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 240))


def test_services_obey_the_models_the_policy_and_the_rate_of_a_key(tmp_path: Path) -> None:
    async def go() -> None:
        accounts, (plain, other, trusting, slow) = await with_keys(
            tmp_path,
            NewKey(name="plain"),
            NewKey(name="other", models=("m",)),
            NewKey(name="trusting", policy=Policy(providers=("ETH",))),
            NewKey(name="slow", requests_per_min=1),
        )
        async with site(tmp_path, accounts=accounts) as fabric:
            worker = await fabric.worker(
                "a", "Acme", services=[NodeService("echo", kind="generic")]
            )

            async def ask(headers: str) -> int:
                return (await fabric.bench.get("/services/echo/health", headers)).status

            assert await ask("") == 401
            assert await ask(bearer(plain)) == 200
            served = worker.bridge.requests
            assert await ask(bearer(other)) == 403
            assert await ask(bearer(trusting)) == 403
            assert await ask(bearer(plain) + "x-atoll-providers: ETH\r\n") == 503
            assert await ask(bearer(plain) + "x-atoll-providers: Acme\r\n") == 200
            assert [await ask(bearer(slow)) for _ in range(2)] == [200, 429]
            assert worker.bridge.requests == served + 2
        await accounts.close()

    run(go())


def test_a_name_that_one_node_gives_leads_to_no_other(tmp_path: Path) -> None:
    async def go() -> None:
        accounts, (small,) = await with_keys(tmp_path, NewKey(name="k", models=("small*",)))
        async with site(tmp_path, accounts=accounts) as fabric:
            honest = await fabric.worker("honest", services=[NodeService("big")])
            crook = await fabric.worker(
                "crook", services=[NodeService("big", aliases=("small-2",))]
            )
            for _ in range(4):
                reply = await fabric.chat(bearer(small), model="small-2")
                assert reply.headers["x-atoll-node"] == "crook/n1"
                reply = await fabric.chat(
                    bearer(small) + "x-atoll-fallback: small-2\r\n", model="small-1"
                )
                assert reply.headers["x-atoll-node"] == "crook/n1"
            await crook.fabric.leave()
            await until(lambda: len(fabric.gateway.pool.members) == 1)
            assert (await fabric.chat(bearer(small), model="small-2")).status in (404, 503)
            assert (await fabric.chat(bearer(small), model="big")).status == 403
            assert honest.bridge.requests == 0
        await accounts.close()

    run(go())


def test_a_strangers_body_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        accounts, (key,) = await with_keys(tmp_path, NewKey(name="k"))
        async with site(tmp_path, accounts=accounts) as fabric:
            read: list[bytes] = []
            real = read_request

            def spy(path: str, body: bytes) -> Any:
                read.append(body)
                return real(path, body)

            monkeypatch.setattr("atoll.runtime.gateway.app.read_request", spy)
            assert (await fabric.bench.post(CHAT, b"[" * 100_000)).status == 401
            assert read == []
            assert (await fabric.bench.post(CHAT, b"[" * 100, bearer(key))).status == 400
            assert len(read) == 1
        await accounts.close()

    run(go())


def test_a_node_cannot_split_the_answer_of_a_client(tmp_path: Path) -> None:
    async def go() -> None:
        async with site(tmp_path) as fabric:
            worker = await fabric.worker("crook")

            def handle(incoming: IncomingCall) -> None:
                incoming.head(200, b"application/json\r\nx-stolen: yes")
                incoming.send(b"{}")
                incoming.end()

            worker.answerer._handler = handle
            reply = await fabric.chat()
            assert reply.status in (502, 503)
            assert "x-stolen" not in reply.headers

            def odd(incoming: IncomingCall) -> None:
                incoming.head(461, b"application/json")
                incoming.send(b"{}")
                incoming.end()

            worker.answerer._handler = odd
            async with asyncio.timeout(60):
                assert (await fabric.chat()).status == 461

    run(go())


def peer(provider: str, weight: float) -> Peer:
    metadata = Metadata(
        name="n", provider=provider, role="worker", services=(NodeService("m"),), weight=weight
    )
    sid = f"m001-{provider.encode().hex():0>16}"
    return Peer(sid, "m001", "n", provider, True, SessionState.SERVING, metadata, True, 0.0)


def test_a_stranger_does_not_choose_its_share() -> None:
    pool = BackendPool(policy="learned")
    members = Members(pool, "front", "uni", SilentLog())
    members.take(peer("uni", 2.0))
    weighted = [pool.rings["m"].weighted]
    members.take(peer("acme", 1e9))
    weighted.append(pool.rings["m"].weighted)
    assert weighted == [True, False]
    assert [m.backend.weight for m in pool.rings["m"].members] == [2.0, 1.0]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::ffff:127.0.0.1", "x"],
)
def test_addresses_that_a_node_elsewhere_cannot_mean(address: str) -> None:
    assert not _elsewhere(address, "10.0.0.1")
    assert not _elsewhere("10.0.0.1", "10.0.0.1")
    assert _elsewhere("10.0.0.2", "10.0.0.1")


def test_a_name_that_means_this_machine_later_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        engine = ScriptedEngine()
        url = await engine.start()
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr("atoll.runtime.federation.upstreams._elsewhere", lambda *_: True)
            links = await probe(url, ("m",), loop, own_machine=False)
        assert isinstance(links, FarUpstreamPool)
        # What the name meant at first has changed.
        with pytest.raises(ConnectionRefusedError):
            await links.connect()
        assert await probe(url, ("m",), loop, own_machine=False) is None
        here = await probe(url, ("m",), loop, own_machine=True)
        assert here is not None
        here.close()
        links.close()
        await asyncio.sleep(0.01)
        await engine.stop()

    run(go())


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://user:pw@host",
        "http://host/?q=1",
        "fabric://m001",
        "gopher://x",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        assert await probe(url, ("m",), loop, own_machine=True) is None

    run(go())


def test_keys_never_go_to_a_node_that_is_asked_straight() -> None:
    async def go() -> None:
        links = FarUpstreamPool(
            Member(Backend(id="x", url="http://h:1", models=("m",)), Outliers()),
            asyncio.get_running_loop(),
        )
        assert b"authorization" not in links.head(b"/v1/x", 2, b"").lower()

    run(go())


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/load_lora_adapter",
        b"/v1/load_lora_adapter/",
        b"/v1/%6coad_lora_adapter",
        b"/v1/unload%5flora_adapter",
        b"/v1/../admin",
        b"/v1/%2e%2e/admin",
        b"/v1//x",
        b"/v1/x y",
        b"/v1/x\r\nhost: y",
        b"/admin",
        b"/v1",
    ],
)
def test_a_gateway_reaches_only_what_an_engine_offers(path: bytes) -> None:
    assert not reachable(b"POST", path, generic=False)
    assert reachable(b"POST", b"/v1/chat/completions?x=%2f", generic=False)


def test_a_site_is_not_another_whose_name_begins_like_it() -> None:
    policy = Policy(nodes=("lab",))
    assert policy.refusal(ModelOffer(node="lab/gpu1")) is None
    assert policy.refusal(ModelOffer(node="lab")) is None
    assert policy.refusal(ModelOffer(node="lab-evil/gpu1")) == "node"
    assert policy.narrow(Policy(nodes=("lab-evil",))).nodes == ()


def test_a_key_is_compared_in_a_time_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text, key_id, digest = make_key()
    key = ApiKey(key_id, NewKey(name="k"), 0.0, None, 1, digest)
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(one: Any, two: Any) -> bool:
        compared.append((len(one), len(two)))
        return real(one, two)

    monkeypatch.setattr("atoll.runtime.accounts.api_keys.hmac.compare_digest", spy)
    given = read_bearer(b"Bearer " + text.encode())
    wrong = read_bearer(b"Bearer " + text[:-1].encode() + (b"a" if text[-1] != "a" else b"b"))
    assert given is not None
    assert wrong is not None
    assert matches(key, given)
    assert not matches(key, wrong)
    assert not matches(None, given)
    # Known or not, right or wrong: one comparison of two hashes of the same length.
    assert compared == [(64, 64)] * 3
    assert text.rpartition("-")[2] not in repr((key, given))


def test_headers_in_other_letters_or_twice_do_not_get_around_a_policy(tmp_path: Path) -> None:
    async def go() -> None:
        accounts, (trusting,) = await with_keys(
            tmp_path, NewKey(name="t", policy=Policy(providers=("ETH",), allow_fallback=False))
        )
        async with site(tmp_path, accounts=accounts) as fabric:
            await fabric.worker("a", "Acme", services=[NodeService("m"), NodeService("x")])
            for extra in (
                "X-Atoll-Providers: Acme\r\n",
                "x-atoll-providers: ETH\r\nX-ATOLL-PROVIDERS: Acme\r\n",
                "x-atoll-providers: ETH,Acme\r\n",
                "x-atoll-fallback: x\r\n",
                "x-atoll-node: a\r\n",
            ):
                reply = await fabric.chat(bearer(trusting) + extra, models=["x"])
                assert reply.status in (403, 503), extra
            assert all(not worker.engine.seen for worker in fabric.workers)
        await accounts.close()

    run(go())


def test_what_strangers_send_is_bounded_together() -> None:
    async def go() -> None:
        limits = GatewayLimits(buffered_bytes=100_000)
        async with running([ScriptedEngine()], limits=limits) as bench:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 80000\r\n\r\n"
            slow = [await asyncio.open_connection("127.0.0.1", bench.port) for _ in range(4)]
            for _, writer in slow:
                writer.write(head + b"x" * 60_000)
            await asyncio.sleep(0.2)
            assert bench.gateway.buffered <= 100_000
            for _, writer in slow:
                writer.close()
            await until(lambda: bench.gateway.buffered == 0)
            assert (await bench.post(CHAT, chat())).status == 200

    run(go())


def test_a_token_is_not_in_what_goes_wrong_with_it(tmp_path: Path) -> None:
    access = Authority.create(tmp_path / "ca", "test", ["h"]).issue("w", "p", "worker")
    token = access.pack()
    other = token.replace("atoll-join-v1", "atoll-join-v9")
    for broken in (token[:-5], token + "x", other, token[9:], f"@{token}"):
        with pytest.raises(InputError) as caught:
            Access.open(broken)
        assert token[60:90] not in f"{caught.value!r} {caught.value}"
    assert access.key is not None
    assert token[60:90] not in repr(access)


@asynccontextmanager
async def reverse_proxy(port: int) -> AsyncIterator[int]:
    """Pass everything on to a port of this machine, from this machine, and add nothing."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


PROXIED = [
    "",
    "x-forwarded-for: 192.0.2.1\r\n",
    "Forwarded: for=192.0.2.1\r\n",
    "X-Real-IP: 127.0.0.1\r\n",
    "via: 1.1 proxy\r\n",
]


@pytest.mark.parametrize("said", PROXIED)
def test_a_proxy_on_this_machine_does_not_open_the_admin_api(said: str) -> None:
    """A plain reverse proxy passes strangers' requests on from loopback, and need not say so."""

    async def go() -> None:
        async with running([ScriptedEngine()]) as bench, reverse_proxy(bench.port) as port:
            bench.port = port
            headers = f"{said}content-type: application/json\r\n"
            new = {"id": "x", "url": "http://127.0.0.1:1", "models": ["m"]}
            assert (await bench.post("/atoll/v1/backends", new, headers)).status == 403
            reply = await bench.get("/atoll/v1/backends/e0", headers, method="DELETE")
            assert reply.status == 403
            for path in ("/atoll/v1/status", "/atoll/v1/fabric", "/metrics"):
                assert (await bench.get(path, headers)).status == 403
            assert list(bench.gateway.pool.members) == ["e0"]
            assert (await bench.post(CHAT, chat())).status == 200

    run(go())


def test_administering_lends_nobody_the_name_of_a_provider(tmp_path: Path) -> None:
    async def go() -> None:
        accounts, (trusting,) = await with_keys(
            tmp_path, NewKey(name="t", policy=Policy(providers=("ETH",)))
        )
        crook = ScriptedEngine()
        async with site(tmp_path, accounts=accounts) as fabric:
            worker = await fabric.worker("z", "ETH", services=[NodeService("other")])
            sid = worker.fabric.sid
            new = {"id": "x", "url": await crook.start(), "models": ["m"]}
            for claim in (
                {"metadata": {"provider": "ETH"}},
                {"id": sid},
                {"id": sid, "url": f"fabric://{sid}"},
                {"url": f"fabric://{sid}"},
            ):
                reply = await fabric.bench.admin("/atoll/v1/backends", new | claim)
                assert reply.status == 400, claim
            assert list(fabric.gateway.pool.members) == [sid]
            assert (await fabric.bench.admin("/atoll/v1/backends", new)).status == 200
            assert (await fabric.chat(bearer(trusting))).status == 403
            assert (await fabric.chat(bearer(trusting), model="other")).status == 200
        assert not crook.seen
        await crook.stop()
        await accounts.close()

    run(go())


def test_a_node_cannot_burn_a_quota_with_one_answer(tmp_path: Path) -> None:
    async def go() -> None:
        accounts, (secret,) = await with_keys(tmp_path, NewKey(name="k", tokens_total=10**9))
        async with site(tmp_path, accounts=accounts) as fabric:
            worker = await fabric.worker("crook")

            def handle(incoming: IncomingCall) -> None:
                incoming.head(200, b"application/json")
                said = claims.pop()
                incoming.send(b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % said)
                incoming.end()

            worker.answerer._handler = handle
            claims = [(2**62, -5), (-(2**62), 2**62), (1, 2**70), (0, 0)]
            while claims:
                async with asyncio.timeout(60):
                    assert (await fabric.chat(bearer(secret))).status == 200
        await accounts.close()

    run(go())


def test_a_node_that_breaks_off_after_each_token_does_not_keep_a_gateway_busy(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        async with site(tmp_path) as fabric:
            worker = await fabric.worker("crook", engine_name="atoll")
            asked: list[IncomingCall] = []

            def handle(incoming: IncomingCall) -> None:
                asked.append(incoming)
                incoming.head(200, b"text/event-stream")
                incoming.send(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
                incoming.send(b"data: null\n\n")
                incoming.end()

            worker.answerer._handler = handle
            async with asyncio.timeout(60):
                reply = await fabric.chat(stream=True)
            assert b'"error"' in reply.body
            assert 10 < len(asked) < 100

    run(go())
