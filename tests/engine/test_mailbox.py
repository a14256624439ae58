"""Messages between mailboxes of one process, over ZeroMQ's own ways inside it."""

from __future__ import annotations

import pytest

zmq = pytest.importorskip("zmq", reason="needs the extra 'engine'")

from atoll.engine.engine_messages import SchedulerHello, Stop  # noqa: E402
from atoll.engine.mailbox import ZmqMailbox  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("busy_s", [0.0, 5.0])
def test_what_came_is_returned_whether_one_sleeps_or_looks(busy_s: float) -> None:
    context = zmq.Context()
    inbox = ZmqMailbox("inproc://inbox", context)
    sender = ZmqMailbox("inproc://sender", context)
    try:
        sender.send(inbox.endpoint, SchedulerHello(reply_to="inproc://sender"))
        sender.send(inbox.endpoint, Stop(drain=True))
        assert inbox.receive(5.0, busy_s) == [
            SchedulerHello(reply_to="inproc://sender"),
            Stop(drain=True),
        ]
        # Nothing more: it is looked for, and then no longer waited for.
        assert inbox.receive(0.0, 0.001) == []
    finally:
        sender.close()
        inbox.close()
        context.term()


def test_a_connection_that_breaks_is_noticed() -> None:
    context = zmq.Context()
    node, scheduler = ZmqMailbox(context=context), ZmqMailbox(context=context)
    try:
        node.watch(scheduler.endpoint)
        node.send(scheduler.endpoint, Stop(drain=True))
        assert scheduler.receive(10.0)
        assert node.take_broken() == []
        scheduler.close()
        broken = node.take_broken()
        # The other side hears of it a little later.
        for _ in range(200):
            broken = broken or ([] if node.receive(0.05) else node.take_broken())
        assert broken == [scheduler.endpoint]
    finally:
        node.close()
        context.destroy(0)
