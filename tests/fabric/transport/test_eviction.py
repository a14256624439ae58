"""Cutting one connection of a process, and dialling again at one's own pace."""

from __future__ import annotations

import random
import socket

from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.transport.eviction import cut_link
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.zenoh_config import retry


def test_only_the_connection_named_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ours = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        theirs = [listener.accept()[0] for _ in ours]
        here = f"tls/127.0.0.1:{port}"
        there = f"tls/127.0.0.1:{ours[0].getsockname()[1]}"
        assert cut_link(here, there) == 1
        assert ours[0].recv(1) == b""
        theirs[1].send(b"x")
        assert ours[1].recv(1) == b"x"
        assert cut_link(here, "tls/127.0.0.1:1") == 0
        assert cut_link(here, "tls/[::ffff:127.0.0.1]:1") == 0
        for connection in (*ours, *theirs):
            connection.close()


@given(seed=st.integers(0, 10_000))
def test_members_dial_again_at_times_of_their_own_within_bounds(seed: int) -> None:
    own = FabricSettings()
    one, other = retry(own, random.Random(seed)), retry(own, random.Random(seed + 1))
    assert one != other
    assert 50 <= float(str(one["period_init_ms"])) <= 150
    assert 250 <= float(str(one["period_max_ms"])) <= 750
    assert 1.5 <= float(str(one["period_increase_factor"])) <= 3.0
