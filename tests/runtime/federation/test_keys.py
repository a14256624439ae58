"""A gateway with keys: who gets in, what is written down, and that keys stay secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.fabric.registry.records import NodeService
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.pool.policy import Policy
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.federation.live import shown, site
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT, chat

pytest.importorskip("sqlalchemy", reason="needs the extra 'accounts'")


async def with_keys(tmp_path: Path, *keys: NewKey) -> tuple[Accounts, list[str]]:
    url = sqlite_url(tmp_path)
    database = await Database.open(url)
    made = [await database.create_key(key) for key in keys]
    await database.close()
    accounts = await Accounts.open(url, journal=tmp_path / "journal")
    return accounts, [secret for secret, _ in made]


def bearer(secret: str) -> str:
    return f"authorization: Bearer {secret}\r\n"


async def test_keys_models_and_policies(tmp_path: Path) -> None:
    accounts, (plain, only_big, trusting) = await with_keys(
        tmp_path,
        NewKey(name="plain"),
        NewKey(name="big", models=("big",)),
        NewKey(name="trusting", policy=Policy(providers=("ETH",))),
    )
    async with site(tmp_path, accounts=accounts, affinity=False) as fabric:
        await fabric.worker("a", "Acme", services=[NodeService("m"), NodeService("big")])
        assert (await fabric.chat(bearer("atoll-nonsense"))).status == 401
        assert (await fabric.chat(bearer(plain))).status == 200
        # What a key may not use stands in for nothing.
        reply = await fabric.chat(
            bearer(only_big) + "x-atoll-fallback: m\r\nx-atoll-node: elsewhere\r\n", model="big"
        )
        assert reply.status == 503
        reply = await fabric.chat(bearer(trusting))
        assert reply.status == 403
        assert shown(reply)["error"]["code"] == "policy_forbids"
        await fabric.worker("b", "ETH")
        for _ in range(3):
            reply = await fabric.chat(bearer(trusting))
            assert reply.headers["x-atoll-provider"] == "ETH"
        # A request cannot widen what its key allows.
        reply = await fabric.chat(bearer(trusting) + "x-atoll-providers: Acme\r\n")
        assert reply.status == 503
        page = (await fabric.bench.admin("/metrics")).body.decode()
        assert 'atoll_keys_refused_total{status="401"}' in page
        seen = [s for w in fabric.workers for s in w.engine.seen]
        assert seen
        assert not any(secret in str(s) for s in seen for secret in (plain, only_big, trusting))
        await fabric.bench.settled()
    await accounts.close()


async def test_a_key_on_a_gateway_without_a_fabric(tmp_path: Path) -> None:
    from atoll.runtime.gateway.app import Gateway
    from atoll.runtime.gateway.settings import GatewaySettings
    from atoll.runtime.pool.member import Backend
    from atoll.runtime.pool.pool import BackendPool
    from tests.runtime.gateway.harness import Bench

    accounts, (secret,) = await with_keys(
        tmp_path, NewKey(name="k", policy=Policy(regions=("eu",)))
    )
    engine = ScriptedEngine()
    pool = BackendPool(
        [
            Backend(
                id="e",
                url=await engine.start(),
                models=("m",),
                kind="vllm",
                metadata={"region": "eu-west", "provider": "ETH"},
            )
        ]
    )
    gateway = Gateway(pool, GatewaySettings(port=0, admin_socket=""), accounts=accounts)
    _, port = await gateway.start()
    bench = Bench(gateway, [engine], port)
    assert (await bench.post(CHAT, chat())).status == 401
    reply = await bench.post(CHAT, chat(), bearer(secret))
    assert reply.status == 200
    # A provider is what a certificate says; a backend that has none may not claim one.
    assert "x-atoll-provider" not in reply.headers
    reply = await bench.post(CHAT, chat(), bearer(secret) + "x-atoll-providers: ETH\r\n")
    assert reply.status == 503
    reply = await bench.post(CHAT, chat(), bearer(secret) + "x-atoll-regions: us\r\n")
    assert reply.status == 503
    await bench.settled()
    await gateway.close()
    await engine.stop()
    await accounts.close()
