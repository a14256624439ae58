"""Several gateway processes at one address, and what one key may do at all of them together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.http.listen_address import free_ports
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.federation.test_command import Processes, ask, processes

pytest.importorskip("sqlalchemy", reason="needs the extra 'accounts'")
__all__ = ["processes"]

_LIMIT = 12
_GATEWAYS = 3
_REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


async def _make_key(url: str) -> str:
    database = await Database.open(url)
    text, _ = await database.create_key(NewKey(name="n", requests_per_min=_LIMIT, strict=True))
    await database.close()
    return text


@pytest.mark.slow
def test_one_key_at_three_gateways_of_one_address(processes: Processes, tmp_path: Path) -> None:
    url = sqlite_url(tmp_path)
    key = asyncio.run(_make_key(url))
    engine = processes.line(processes.start("tests.runtime.gateway.engine")).strip()
    backend = {"id": "e", "url": engine, "models": ["m"]}
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"backends": [backend]}))
    (port,) = free_ports(1)
    logs = [tmp_path / f"log{number}" for number in range(_GATEWAYS)]
    started = [
        processes.start(
            *("atoll", "gateway", "--config", str(config), "--db", url, "--port", str(port)),
            *("--share-port", "--log", str(log), "--json", "--journal", str(tmp_path / "journal")),
        )
        for log in logs
    ]
    sockets = [json.loads(processes.line(gateway))["admin_socket"] for gateway in started]
    assert len(set(sockets)) == _GATEWAYS
    statuses: Counter[int] = Counter()
    began_s = time.monotonic()
    # A new connection each time: the kernel gives it to one of them.
    for _ in range(6 * _LIMIT):
        statuses[ask(f"http://127.0.0.1:{port}/v1/chat/completions", _REQUEST, key)[0]] += 1
    seconds = time.monotonic() - began_s
    assert set(statuses) == {200, 429}
    # All of the limit is to be had, and nothing more, whoever is asked.
    assert _LIMIT <= statuses[200] <= _LIMIT + _LIMIT / 60 * seconds
    answered = [
        sum('"event":"request"' in line for line in log.read_text().splitlines()) for log in logs
    ]
    assert sum(answered) == statuses[200]
    assert sum(count > 0 for count in answered) >= 2
    # One of them ends: the others go on at the address.
    os.kill(started[0].pid, signal.SIGTERM)
    assert started[0].wait(60) == 0
    assert ask(f"http://127.0.0.1:{port}/v1/models", key=key)[0] == 200
    # Who does not share the port is told.
    alone = processes.start(
        "atoll", "gateway", "--open", "--config", str(config), "--port", str(port)
    )
    assert alone.wait(60) != 0
    assert f"port {port} of 127.0.0.1 is in use" in processes.errors()
