"""Paths and executors are assigned by weight, smoothly, to whom is alive."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.plan import RequestPath, RequestStep
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphService
from atoll.runtime.graph_server.path_router import PathRouter, WeightedRoundRobin
from atoll.workload.classes import Brought
from tests.seeds import examples

TEXT: Brought = (("text",), ("text",))
SPOKEN: Brought = (("text", "audio"), ("text", "audio"))
quick = examples(50)
weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1, max_size=6)


def executor(name: str, *components: str) -> ExecutorAddress:
    return ExecutorAddress(id=name, address="127.0.0.1:1", components=components)


def path(klass: str, share: float, *steps: RequestStep) -> RequestPath:
    return RequestPath(service="omni", klass=klass, share=share, steps=steps)


def step(parts: str, **instances: float) -> RequestStep:
    named = {name.replace("_", "-"): weight for name, weight in instances.items()}
    return RequestStep(parts=tuple(parts.split("+")), instances=named)


def service(*paths: RequestPath) -> GraphService:
    return GraphService(
        name="omni",
        tasks={"chat": "x:Y"},
        parts={"audio": ("encoder", "decoder"), "llm": ("chat",), "speech": ("speak",)},
        paths=paths,
    )


EXECUTORS = (
    executor("hear-0", "encoder", "decoder"),
    executor("hear-1", "encoder", "decoder"),
    executor("think-0", "chat"),
    executor("think-1", "chat"),
    executor("all-0", "encoder", "decoder", "chat", "speak"),
)


@quick
@given(weights, st.integers(1, 120))
def test_everyone_is_within_one_of_its_share_at_any_time(
    shares: dict[str, float], count: int
) -> None:
    turns = WeightedRoundRobin(shares)
    chosen: Counter[str] = Counter()
    total = sum(shares.values())
    for number in range(1, count + 1):
        name = turns.choose()
        assert name is not None
        chosen[name] += 1
        for each, weight in shares.items():
            assert abs(chosen[each] - number * weight / total) < 1.0 + 1e-6


@quick
@given(weights, st.lists(st.sets(st.sampled_from("abcdef")), min_size=1, max_size=40))
def test_nobody_who_is_closed_is_dealt_while_another_is_open(
    shares: dict[str, float], closings: list[set[str]]
) -> None:
    turns = WeightedRoundRobin(shares)
    for closed in closings:
        name = turns.choose(closed)
        if set(shares) <= closed:
            assert name is None
        else:
            assert name in set(shares) - closed


def test_who_has_no_weight_is_dealt_only_when_nobody_else_is_left() -> None:
    turns = WeightedRoundRobin({"a": 1.0, "b": 0.0})
    assert [turns.choose() for _ in range(3)] == ["a", "a", "a"]
    assert turns.choose({"a"}) == "b"
    assert WeightedRoundRobin({"a": 0.0, "b": 0.0}).choose({"a"}) == "b"


def test_a_class_takes_its_paths_by_their_shares_and_labels_do_not_matter() -> None:
    router = PathRouter(
        service(
            path("text (short)", 0.75, step("llm", think_0=1.0)),
            path("text (short)", 0.25, step("llm", think_1=0.5, all_0=0.5)),
        ),
        EXECUTORS,
    )
    found = Counter(router.route(TEXT).executors["chat"] for _ in range(80))
    assert found == {"think-0": 60, "think-1": 10, "all-0": 10}


def test_parts_stand_for_components_and_are_shown() -> None:
    router = PathRouter(
        service(
            path(
                "audio -> audio",
                1.0,
                step("audio", hear_0=1.0),
                step("llm+speech", all_0=1.0),
            )
        ),
        EXECUTORS,
    )
    route = router.route(SPOKEN)
    assert route.executors == {
        "encoder": "hear-0",
        "decoder": "hear-0",
        "chat": "all-0",
        "speak": "all-0",
    }
    assert route.describe() == "audio=hear-0;llm=all-0;speech=all-0"
    assert route.klass == "audio -> audio"


def test_a_request_without_a_class_of_its_own_takes_the_smallest_that_has_all_of_it() -> None:
    router = PathRouter(
        service(
            path("image+audio -> audio", 1.0, step("llm", think_0=1.0)),
            path("audio -> audio", 1.0, step("llm", think_1=1.0)),
        ),
        EXECUTORS,
    )
    assert router.route(TEXT).klass == "audio -> audio"
    assert router.route((("text", "video"), ("text",))).klass == ""


def test_who_comes_and_goes_is_known_to_requests_that_run() -> None:
    router = PathRouter(service(path("text", 1.0, step("llm", think_0=1.0))), EXECUTORS[2:3])
    route = router.route(TEXT)
    assert route.executor("chat", {"think-0"}) is None
    router.use([])
    assert router.candidates("chat") == ()
    assert "chat" in router.components
    router.use([executor("think-9", "chat")])
    assert route.executor("chat", {"think-0"}) == "think-9"


def test_dead_executors_and_paths_over_them_are_left_out() -> None:
    router = PathRouter(
        service(
            path("text", 0.5, step("llm", think_0=1.0)),
            path("text", 0.5, step("llm", think_1=0.5, all_0=0.5)),
        ),
        EXECUTORS,
    )
    for _ in range(10):
        route = router.route(TEXT, {"think-0", "think-1"})
        # By its path, not as a replacement.
        assert route.executors == {"chat": "all-0"}
        assert route.executor("chat", {"think-0", "think-1"}) == "all-0"
    everyone = {"think-0", "think-1", "all-0"}
    assert router.route(TEXT, everyone).executor("chat", everyone) is None


def test_without_paths_all_executors_of_a_component_are_dealt_and_kept_for_the_request() -> None:
    router = PathRouter(service(), EXECUTORS)
    routes = [router.route(TEXT) for _ in range(6)]
    found = [route.executor("encoder") for route in routes]
    assert Counter(found) == {"hear-0": 2, "hear-1": 2, "all-0": 2}
    assert [route.executor("encoder") for route in routes] == found
    assert routes[0].describe() == f"encoder={found[0]}"


def test_an_executor_of_the_path_that_does_not_run_a_component_is_not_asked_for_it() -> None:
    router = PathRouter(service(path("text", 1.0, step("speech", hear_0=1.0))), EXECUTORS)
    assert router.route(TEXT).executor("speak") == "all-0"


def test_a_replacement_is_kept_and_shown() -> None:
    router = PathRouter(service(path("text", 1.0, step("llm", think_0=1.0))), EXECUTORS)
    route = router.route(TEXT)
    other = route.executor("chat", {"think-0"})
    assert other in ("think-1", "all-0")
    assert route.executor("chat") == other
    assert route.describe() == f"llm={other}"


def test_pieces_are_spread_within_the_step_of_the_path() -> None:
    router = PathRouter(
        service(path("text", 1.0, step("llm", think_0=0.5, think_1=0.5))), EXECUTORS
    )
    route = router.route(TEXT)
    own = route.executor("chat")
    other = {"think-0": "think-1", "think-1": "think-0"}[str(own)]
    assert route.spread("chat", {}) == own
    assert route.spread("chat", {str(own): 1}) == other
    # all-0 runs it too, but the plan does not send this path there.
    assert route.spread("chat", {str(own): 1, other: 1}) == own
    assert route.spread("chat", {str(own): 1}, {other}) == own
    assert route.executor("chat") == own
    apart = PathRouter(service(), EXECUTORS).route(TEXT)
    first = str(apart.executor("encoder"))
    assert apart.spread("encoder", {first: 1}) not in (None, first)
