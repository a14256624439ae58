from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.tunnel.channel import Channel, ForgedError, PacketCipher, channel_of
from atoll.fabric.tunnel.tunnel_frames import (
    CHUNK,
    DATA,
    PACKET,
    RequestHead,
    TunnelError,
    decode_amount,
    decode_answer,
    decode_submit,
    encode_submit,
    split_frames,
)
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

SETTINGS = TunnelSettings()
A, B = b"a" * 32, b"b" * 32


def ends(settings: TunnelSettings = SETTINGS) -> tuple[Channel, Channel]:
    return Channel(7, PacketCipher(A, B), settings, 0.0), Channel(
        7, PacketCipher(B, A), settings, 0.0
    )


def test_frames_of_one_turn_share_a_packet() -> None:
    left, right = ends()
    for stream in range(5):
        left.push(CHUNK, stream, b"token")
    (packet,) = left.flush(0.0)
    assert right.receive(packet, 0.0) == [(CHUNK, n, b"token") for n in range(5)]
    assert channel_of(packet) == 7
    assert b"token" not in packet


def test_large_turns_are_split_and_stay_in_order() -> None:
    left, right = ends()
    pieces = [bytes([n]) * 30_000 for n in range(10)]
    for piece in pieces:
        left.push(CHUNK, 1, piece)
    packets = left.flush(0.0)
    assert 1 < len(packets) < 10
    assert [f[2] for p in packets for f in right.receive(p, 0.0)] == pieces


class Lossy:
    """Two ends and a net that loses, repeats and reorders as a seed says."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now_s = 0.0
        self.ends = ends()
        self.wire: list[tuple[int, bytes]] = []
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.got: tuple[list[bytes], list[bytes]] = ([], [])

    def step(self, *, push: bool) -> None:
        rng = self.random
        for side, end in enumerate(self.ends):
            if push and rng.random() < 0.5:
                data = rng.randbytes(rng.randrange(1, 40))
                self.sent[side].append(data)
                end.push(CHUNK, 1, data)
            end.tick(self.now_s, busy=True)
            for packet in end.flush(self.now_s):
                if rng.random() >= self.loss:
                    self.wire.append((1 - side, packet))
                    if rng.random() < self.loss:
                        self.wire.insert(rng.randrange(len(self.wire) + 1), self.wire[-1])
        if self.loss and rng.random() < 0.3:
            rng.shuffle(self.wire)
        deliver = len(self.wire) if not push else rng.randrange(len(self.wire) + 1)
        arriving, self.wire = self.wire[:deliver], self.wire[deliver:]
        for side, packet in arriving:
            self.got[side].extend(f[2] for f in self.ends[side].receive(packet, self.now_s))
        self.now_s += rng.random() * 0.1


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_whatever_the_net_does_everything_arrives_once_and_in_order(seed: int, loss: float) -> None:
    net = Lossy(seed, loss)
    for _ in range(60):
        net.step(push=True)
        for side in (0, 1):
            assert net.got[1 - side] == net.sent[side][: len(net.got[1 - side])]
    net.loss = 0.0
    for _ in range(60):
        net.step(push=False)
    assert net.got == (net.sent[1], net.sent[0])
    assert net.ends[0].settled
    assert net.ends[1].settled


def test_a_loss_at_the_very_end_is_seen_by_the_next_sign_of_life() -> None:
    left, right = ends()
    left.push(CHUNK, 1, b"last")
    assert left.flush(0.0)  # lost
    left.tick(0.3, busy=False)
    (keep,) = left.flush(0.3)
    assert right.receive(keep, 0.3) == []
    (resume,) = right.flush(0.3)
    left.receive(resume, 0.3)
    (again,) = left.flush(0.3)
    assert right.receive(again, 0.3) == [(CHUNK, 1, b"last")]
    assert (left.resent, right.gaps) == (1, 1)


def test_the_same_is_not_sent_again_and_again() -> None:
    left, right = ends()
    left.push(CHUNK, 1, b"lost")
    left.flush(0.0)
    left.push(CHUNK, 1, b"early")
    (early,) = left.flush(0.0)
    for now_s in (0.0, 0.15, 0.3):
        right.receive(early, now_s)
        for packet in right.flush(now_s):
            left.receive(packet, now_s)
        assert len(left.flush(now_s)) == (2 if now_s == 0.0 else 0)
    assert right.gaps == 3
    assert left.resent == 2


def test_a_repeated_packet_is_not_delivered_again() -> None:
    left, right = ends()
    left.push(CHUNK, 1, b"x")
    (packet,) = left.flush(0.0)
    assert right.receive(packet, 0.0)
    assert right.receive(packet, 0.0) == []
    assert right.duplicates == 1


def test_a_repeated_resume_or_close_is_not_heard_again() -> None:
    left, right = ends()
    left.ping()
    (ping,) = left.flush(0.0)
    right.receive(ping, 0.0)
    assert right.flush(0.0)
    right.receive(ping, 1.0)
    assert right.flush(1.0) == []
    assert right.heard_s == 0.0


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_changed_packet_is_taken(at: int, byte: int) -> None:
    left, right = ends()
    left.push(CHUNK, 1, b"x" * 20)
    (packet,) = left.flush(0.0)
    changed = bytearray(packet)
    changed[at % len(packet)] ^= byte
    if bytes(changed) == packet or channel_of(bytes(changed)) != 7:
        return
    with pytest.raises(ForgedError):
        right.receive(bytes(changed), 0.0)
    assert right.receive(packet, 0.0)


@given(st.binary(max_size=100))
def test_noise_is_refused(noise: bytes) -> None:
    _, right = ends()
    with pytest.raises(ForgedError):
        right.receive(noise, 0.0)


def test_ones_own_packets_sent_back_are_refused() -> None:
    left, _ = ends()
    left.push(CHUNK, 1, b"x")
    (packet,) = left.flush(0.0)
    with pytest.raises(ForgedError):
        left.receive(packet, 0.0)


def test_an_acknowledgement_of_what_was_never_sent_breaks_the_rules() -> None:
    _, right = ends()
    header = PACKET.pack(DATA, 7, 0, 5)
    with pytest.raises(TunnelError, match="never sent"):
        right.receive(header + PacketCipher(A, B).seal(header, b""), 0.0)


def test_what_is_never_acknowledged_is_bounded() -> None:
    settings = replace(SETTINGS, channel_window=10_000, packet_bytes=1000)
    left, _ = ends(settings)

    def flood() -> None:
        for _ in range(100):
            left.push(CHUNK, 1, b"x" * 900)
            left.flush(0.0)

    with pytest.raises(TunnelError, match="acknowledges nothing"):
        flood()
    assert left.room < 0


def test_what_comes_early_is_bounded_and_comes_again() -> None:
    settings = replace(SETTINGS, channel_window=10_000, packet_bytes=1000)
    left, right = ends(settings)
    packets = []
    for _ in range(15):
        left.push(CHUNK, 1, b"x" * 900)
        packets += left.flush(0.0)
    for packet in packets[1:]:
        assert right.receive(packet, 0.0) == []
    assert len(right.receive(packets[0], 0.0)) == 13
    for packet in right.flush(0.0):
        left.receive(packet, 0.0)
    assert len([f for p in left.flush(0.0) for f in right.receive(p, 0.0)]) == 2


def test_an_idle_channel_says_nothing() -> None:
    left, _ = ends()
    left.tick(100.0, busy=False)
    assert left.flush(100.0) == []
    left.tick(100.0, busy=True)
    assert len(left.flush(100.0)) == 1
    left.tick(100.1, busy=True)
    assert left.flush(100.1) == []


frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=10
)


@given(frames)
def test_frames_come_out_as_they_went_in(given: list[tuple[int, int, bytes]]) -> None:
    left, right = ends()
    for frame in given:
        left.push(*frame)
    assert [f for p in left.flush(0.0) for f in right.receive(p, 0.0)] == given


@given(st.binary(max_size=200))
def test_decoders_take_or_refuse_but_never_break(noise: bytes) -> None:
    for decode in (
        split_frames,
        decode_answer,
        decode_amount,
        lambda data: decode_submit(data, 100),
    ):
        with contextlib.suppress(TunnelError):
            decode(noise)


def test_the_head_of_a_request_is_bounded() -> None:
    head = RequestHead(b"POST", b"/x", ((b"a", b"b" * 200),), 3)
    assert decode_submit(encode_submit(head, b"xyz"), 1000) == (head, b"xyz")
    with pytest.raises(TunnelError, match="a head of"):
        decode_submit(encode_submit(head, b"xyz"), 100)
