"""Invocations over executors that break: tried elsewhere, resumed, made again; nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.graph_server.dispatch import RequestDispatcher
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphService
from atoll.runtime.graph_server.path_router import PathRouter
from atoll.runtime.graph_server.recovery import TroubleError
from atoll.runtime.graph_server.request_traces import RequestTrace
from atoll.runtime.openai import ApiError
from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.values import Handle
from tests.runtime.graph_server.fakes import FakeFleet

WORDS = ["one ", "two ", "three ", "four ", "five "]


def encode(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"states": np.full(8, inputs["seed"], dtype=np.float32)}


def decode(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"text": str(float(inputs["states"].sum()))}


def chat(inputs: dict[str, Any]) -> Iterator[Any]:
    resume = inputs.get("resume") or {"token_ids": [], "text": ""}
    done = len(resume["token_ids"])
    assert resume["text"] == "".join(WORDS[:done])
    for token in range(done, len(WORDS)):
        yield {"text": WORDS[token], "token_ids": [token]}
    yield ("end", {"text": "".join(WORDS), "completion_tokens": len(WORDS)})


def frames(inputs: dict[str, Any]) -> Iterator[Any]:
    for number in range(3):
        yield {"frame": np.full(8, number + inputs["seed"], dtype=np.float32)}
    yield ("end", {"frames": 3})


COMPONENTS = {"encode": encode, "decode": decode, "chat": chat, "frames": frames}


def bench(
    names: str = "ab", *, dynamic: bool = False, patience_s: float = 5.0
) -> tuple[FakeFleet, RequestDispatcher]:
    fleet = FakeFleet({name: dict(COMPONENTS) for name in names})
    executors = [
        ExecutorAddress(id=name, address="127.0.0.1:1", components=tuple(COMPONENTS))
        for name in names
    ]
    router = PathRouter(GraphService(name="m", tasks={"chat": "x:Y"}), executors)
    route = router.route((("text",), ("text",)))
    trace = RequestTrace("r", "chat", "m")
    return fleet, RequestDispatcher(
        fleet, router, route, trace, patience_s=patience_s, dynamic=dynamic
    )


def invocation(
    number: int, component: str, *, piece: int | None = None, **inputs: Any
) -> Invocation:
    return Invocation(number, piece, component, inputs, component in ("chat", "frames"))


async def test_one_that_takes_the_place_of_the_only_executor_is_found() -> None:
    fleet, dispatcher = bench("a")
    other = ExecutorAddress(id="b", address="127.0.0.1:2", components=tuple(COMPONENTS))
    fleet.down, fleet.executors["b"] = {"a"}, dict(COMPONENTS)
    fleet.on_wait = lambda: dispatcher._router.use([other])
    items, end = await gather(dispatcher, invocation(0, "chat"))
    assert [item["text"] for item in items] == WORDS
    assert end["text"] == "".join(WORDS)
    assert {executor for executor, _ in fleet.calls} == {"b"}


async def gather(dispatcher: RequestDispatcher, what: Invocation) -> tuple[list[Any], Any]:
    items = [item async for item in dispatcher.stream(what)]
    assert isinstance(items[-1], Final)
    return items[:-1], items[-1].value


@pytest.mark.parametrize("code", ["lost", "overloaded", "draining", "failed", "strange"])
async def test_an_invocation_that_fails_is_tried_elsewhere_and_the_rest_follows(code: str) -> None:
    fleet, dispatcher = bench()
    fleet.script["a"].append(TroubleError(code, "no"))
    found: Any = await dispatcher.call(invocation(0, "encode", seed=2))
    assert [executor for executor, _ in fleet.calls] == ["a", "b"]
    await dispatcher.call(invocation(1, "decode", **found))
    entry = dispatcher.trace.invocations[0].shown()
    assert (entry["executor"], entry["attempts"], entry["troubles"]) == ("b", 2, [f"a: {code}"])
    assert (entry["waited_s"], entry["ran_s"], entry["output_bytes"]) == (0.25, 0.5, 32)


async def test_bad_inputs_are_the_clients_fault_and_not_tried_again() -> None:
    fleet, dispatcher = bench()
    fleet.script["a"].append(TroubleError("bad_input", "no such voice", "voice"))
    with pytest.raises(ApiError) as caught:
        await dispatcher.call(invocation(0, "encode", seed=1))
    assert (caught.value.status, caught.value.param, len(fleet.calls)) == (400, "voice", 1)


async def test_it_waits_for_an_executor_to_come_back() -> None:
    fleet, dispatcher = bench()
    fleet.down = {"a", "b"}

    def come_back() -> None:
        if len(fleet.waits) == 3:
            fleet.down.remove("b")

    fleet.on_wait = come_back
    assert await dispatcher.call(invocation(0, "encode", seed=1))
    assert fleet.calls == [("b", "encode")]


async def test_patience_ends() -> None:
    fleet, dispatcher = bench(patience_s=1e-9)
    fleet.down = {"a", "b"}
    with pytest.raises(ApiError) as caught:
        await dispatcher.call(invocation(0, "encode", seed=1))
    assert caught.value.status == 503


async def test_a_lost_input_is_made_again_once_and_nothing_else() -> None:
    fleet, dispatcher = bench()
    first: Any = await dispatcher.call(invocation(0, "encode", seed=2))
    await dispatcher.call(invocation(1, "encode", seed=3))
    lost = next(iter(fleet.arrays))
    del fleet.arrays[lost]
    fleet.calls.clear()
    consumers = [dispatcher.call(invocation(number, "decode", **first)) for number in (2, 3, 4)]
    assert await asyncio.gather(*consumers) == [{"text": "16.0"}] * 3
    assert [name for _, name in fleet.calls].count("encode") == 1
    # The old handle is still what the task knows.
    assert await dispatcher.call(invocation(5, "decode", **first)) == {"text": "16.0"}
    assert (await dispatcher.array(first["states"])).sum() == 16.0


async def test_an_array_that_the_graph_server_itself_misses_is_made_again() -> None:
    fleet, dispatcher = bench()
    pieces, final = await gather(dispatcher, invocation(0, "frames", seed=5))
    assert final == {"frames": 3}
    fleet.arrays.clear()
    handles = [piece["frame"] for piece in pieces]
    assert [float((await dispatcher.array(h))[0]) for h in handles] == [5.0, 6.0, 7.0]
    assert [name for _, name in fleet.calls] == ["frames", "frames"]


async def test_what_a_client_brought_cannot_be_made_again() -> None:
    _, dispatcher = bench()
    brought = Handle("f" * 32, "graph-server", "", "", "", "float32", (8,), 0)
    with pytest.raises(ApiError) as caught:
        await dispatcher.call(invocation(0, "decode", states=brought))
    assert caught.value.status == 500


@given(
    st.sampled_from(["chat", "frames"]),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=4),
)
def test_a_stream_over_dying_executors_is_one_stream(
    component: str, deaths: list[tuple[str, int]]
) -> None:
    async def go() -> None:
        fleet, dispatcher = bench("abc", patience_s=100.0)
        for executor, after in deaths:
            fleet.script[executor].append(after)
        pieces, final = await gather(dispatcher, invocation(0, component, seed=1))
        if component == "chat":
            assert [piece["text"] for piece in pieces] == WORDS
            assert final == {"text": "".join(WORDS), "completion_tokens": 5}
        else:
            handles = [piece["frame"] for piece in pieces]
            assert [float((await dispatcher.array(h))[0]) for h in handles] == [1.0, 2.0, 3.0]
        await dispatcher.close()
        assert fleet.held() == set()
        assert all(count == 1 for count in fleet.released.values())

    asyncio.run(go())


async def test_a_stream_left_early_leaves_nothing_behind() -> None:
    fleet, dispatcher = bench()
    stream = dispatcher.stream(invocation(0, "frames", seed=1))
    await anext(stream)
    await stream.aclose()
    assert len(fleet.held()) == 1
    await dispatcher.close()
    assert fleet.held() == set()


async def test_leases_are_renewed_while_the_request_lives() -> None:
    fleet, dispatcher = bench()
    await dispatcher.call(invocation(0, "encode", seed=1))
    await dispatcher.renew()
    assert fleet.renewed == list(fleet.arrays)
    await dispatcher.close()
    await dispatcher.renew()
    assert len(fleet.renewed) == 1


async def test_sentences_of_an_answer_are_spread_over_copies_while_the_first_is_at_work() -> None:
    fleet, dispatcher = bench("ab")
    gates = [asyncio.Event() for _ in range(4)]
    call = fleet.call

    async def slowly(executor: str, order: Any) -> Any:
        await gates[order.inputs["seed"]].wait()
        return await call(executor, order)

    fleet.call = slowly  # type: ignore[method-assign]

    def start(piece: int) -> asyncio.Task[Any]:
        return asyncio.create_task(
            dispatcher.call(invocation(0, "encode", piece=piece, seed=piece))
        )

    running = [start(piece) for piece in range(4)]
    while len(dispatcher.trace.invocations) < 4:
        await asyncio.sleep(0)
    for gate in reversed(gates):
        gate.set()
    await asyncio.gather(*running)
    # Its own first, then whoever works on fewer.
    where = [entry.executor for entry in dispatcher.trace.invocations]
    assert where == ["a", "b", "a", "b"]
    # Once its own has nothing to do, it is asked alone; so is all that is no piece.
    await start(3)
    await asyncio.gather(*(dispatcher.call(invocation(n, "encode", seed=1)) for n in (1, 2)))
    assert [entry.executor for entry in dispatcher.trace.invocations[4:]] == ["a", "a", "a"]


async def test_a_sentence_whose_copy_breaks_is_spoken_by_another() -> None:
    fleet, dispatcher = bench()
    fleet.script["b"].append(TroubleError("lost", "gone"))
    spoken = await asyncio.gather(
        *(dispatcher.call(invocation(0, "encode", piece=piece, seed=piece)) for piece in (0, 1))
    )
    assert len(spoken) == 2
    second = dispatcher.trace.invocations[1].shown()
    assert (second["executor"], second["troubles"]) == ("a", ["b: lost"])


async def test_dynamic_routing_takes_the_shortest_queue_and_keeps_pieces_together() -> None:
    fleet, dispatcher = bench("abc", dynamic=True)
    fleet.queues = {"a": 4, "b": 1, "c": 2}
    await dispatcher.call(invocation(0, "encode", piece=0, seed=1))
    fleet.queues = {"a": 0, "b": 9, "c": 2}
    await dispatcher.call(invocation(0, "encode", piece=1, seed=1))
    await dispatcher.call(invocation(1, "encode", seed=1))
    fleet.down = {"a"}
    await dispatcher.call(invocation(2, "encode", seed=1))
    assert [executor for executor, _ in fleet.calls] == ["b", "b", "a", "c"]
