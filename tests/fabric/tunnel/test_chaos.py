"""Random nets, clients and members."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.tunnel.tunnel_client import Call
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from tests.fabric.tunnel.harness import (
    LATENCY_S,
    Log,
    Net,
    Pair,
    paced,
    request,
    run,
    tokens,
)
from tests.seeds import examples

SETTINGS = TunnelSettings()


@examples(20)
@given(st.integers(0, 2**32), st.floats(0.0, 0.6), st.integers(1, 6))
def test_any_net_each_stream_is_whole_or_lost_and_nothing_hangs(
    seed: int, loss: float, streams: int
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        bad: list[tuple[float, float]] = []
        at_s = 0.0
        while at_s < 6.0:
            at_s += rng.uniform(0.2, 1.5)
            bad.append((at_s, at_s + rng.uniform(0.0, 1.2)))
            at_s = bad[-1][1]

        def fate(key: str, payload: bytes) -> list[float]:
            if not any(a <= loop.time() < b for a, b in bad) or rng.random() >= loss:
                return [LATENCY_S]
            return [rng.uniform(0, 0.3) for _ in range(rng.choice((0, 0, 1, 2)))]

        pair = Pair(paced(200, 0.01), net=Net(fate))
        bodies = [rng.randbytes(rng.choice((10, 1000, 200_000))) for _ in range(streams)]
        logs = await asyncio.gather(*(pair.ask(request(body)) for body in bodies))
        for log in logs:
            assert bytes(log.data) == tokens(200)[: len(log.data)]
            assert log.ended == (len(log.data) == 1000 and log.lost is None)
            assert log.ended or log.lost
        assert loop.time() < 60
        await asyncio.sleep(SETTINGS.caller_gone_s + 1)
        assert pair.answerer.running == 0
        assert pair.caller.stats()["open_calls"] == 0
        await pair.close()

    run(main())


class Mischief:
    """Clients and members that do things at random."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.rng = random.Random(seed)
        self.calls: list[tuple[Call, Log]] = []
        self.cancelled: set[Call] = set()

    async def go_on(self) -> None:
        for _ in range(60):
            await asyncio.sleep(self.rng.expovariate(20.0))
            self._act()
        for call, _ in self.calls:
            call.resume()
        await asyncio.sleep(10.0)

    def _act(self) -> None:
        what = self.rng.randrange(8)
        if what < 3:
            log = Log()
            self.calls.append((self.pair.caller.call(self.pair.worker.sid, request(), log), log))
        elif what == 3:
            self.rng.choice((self.pair.worker, self.pair.gateway)).renew()
        elif self.calls:
            call, log = self.rng.choice(self.calls)
            if what == 4:
                call.pause()
            elif what < 7:
                call.resume()
            elif not log.done.is_set():
                call.cancel()
                self.cancelled.add(call)


@pytest.mark.slow
@examples(20)
@given(st.integers(0, 2**32))
def test_whatever_clients_and_members_do_others_get_all_of_their_answers(seed: int) -> None:
    async def main() -> None:
        pair = Pair(paced(100, 0.01))
        mischief = Mischief(pair, seed)
        await mischief.go_on()
        for call, log in mischief.calls:
            if call in mischief.cancelled:
                assert not log.done.is_set()
            elif log.lost is None:
                assert log.ended
                assert bytes(log.data) == tokens(100)
            else:
                # Asked in the moment in which the worker took a new session.
                assert not log.data
        assert sum(log.lost is not None for _, log in mischief.calls) <= 2
        assert pair.answerer.running == 0
        assert pair.caller.stats()["open_calls"] == 0
        await pair.close()

    run(main())
