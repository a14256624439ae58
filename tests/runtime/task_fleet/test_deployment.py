"""From plans and files to executors and services."""

from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, UsageError
from atoll.plan.plan import Flow, Guest, Instance, Node, Plan, RequestPath, RequestStep
from atoll.runtime.graph_server.graph_config import ExecutorAddress
from atoll.runtime.graph_server.path_router import PathRouter
from atoll.runtime.task_fleet.deployment import deployment_of
from atoll.runtime.task_fleet.parts import (
    OWN_MODEL,
    ServedParts,
    choose_parts,
    own_parts,
    stand_in_parts,
)
from atoll.runtime.task_fleet.parts_file import read_parts_file, read_tasks_file


def _executor(name: str, parts: str, per_s: float = 1.0) -> Instance:
    return Instance(
        id=name,
        service="assistant",
        role=f"assistant/{parts}/serve",
        region="here",
        stages=1,
        nodes=(Node(id="n0", node_type="T4:1", market="owned", start=0, end=1, tp=1),),
        flows=(
            Flow(src="source", dst="n0", per_s=per_s),
            Flow(src="n0", dst="sink", per_s=per_s),
        ),
        throughput_per_s=per_s,
        usd_per_hour=0.0,
    )


def _plan(*instances: Instance, paths: tuple[RequestPath, ...]) -> Plan:
    return Plan(
        problem_hash="0" * 8,
        problem_name="test",
        instances=instances,
        paths=paths,
        usd_per_hour=0.0,
        status="feasible",
        solver="test",
        models={"assistant": OWN_MODEL},
    )


def _path(klass: str, *steps: tuple[str, dict[str, float]]) -> RequestPath:
    return RequestPath(
        service="assistant",
        klass=klass,
        share=1.0,
        steps=tuple(
            RequestStep(parts=tuple(parts.split("+")), instances=names) for parts, names in steps
        ),
    )


def test_a_plan_becomes_executors_with_components_and_its_paths() -> None:
    path = _path("audio -> audio", ("audio", {"ears-0": 1.0}), ("llm+speech", {"mind-0": 1.0}))
    plan = _plan(
        _executor("ears-0", "audio"), _executor("mind-0", "llm+speech", 2.0), paths=(path,)
    )
    found = deployment_of(plan, ["assistant"], {"assistant": own_parts()})
    assert [list(e.components) for e in found.executors] == [
        ["silero-vad", "moonshine-encoder", "moonshine-decoder"],
        ["smollm2", "hibari"],
    ]
    assert [e.work for e in found.executors] == [1.0, 2.0]
    assert found.services[0].paths == (path,)
    assert found.services[0].parts["audio"] == (
        "silero-vad",
        "moonshine-encoder",
        "moonshine-decoder",
    )
    assert set(found.services[0].tasks) == {"chat", "transcriptions", "speech"}
    assert not found.stand_ins


def test_executors_that_run_nothing_here_are_left_out_of_paths() -> None:
    served = ServedParts(
        parts={"llm": ("smollm2",), "talker": (), "vocoder": ("hibari",)},
        tasks=own_parts().tasks,
        stand_in="small ones",
    )
    path = _path(
        "text -> audio",
        ("llm", {"mind-0": 1.0}),
        ("talker", {"talker-0": 1.0}),
        ("vocoder", {"mouth-0": 0.5, "mouth-1": 0.5}),
    )
    plan = _plan(
        _executor("mind-0", "llm"),
        _executor("talker-0", "talker"),
        _executor("mouth-0", "vocoder"),
        _executor("mouth-1", "vocoder"),
        paths=(path,),
    )
    found = deployment_of(plan, ["assistant"], {"assistant": served})
    assert [executor.id for executor in found.executors] == ["mind-0", "mouth-0", "mouth-1"]
    assert [step.parts for step in found.services[0].paths[0].steps] == [("llm",), ("vocoder",)]
    assert found.stand_ins == {"assistant": "small ones"}


def test_phases_apart_are_served_together_where_the_plan_decodes() -> None:
    look = _path("image+text", ("vision+llm.prefill", {"a": 1.0}), ("llm.decode", {"b": 1.0}))
    path = _path("text", ("llm.prefill", {"c": 1.0}), ("llm.decode", {"b": 1.0}))
    plan = _plan(
        _executor("a", "vision+llm.prefill"),
        _executor("b", "llm.decode"),
        _executor("c", "llm.prefill"),
        paths=(look, path),
    )
    found = deployment_of(plan, ["assistant"], {"assistant": own_parts()})
    assert {one.id: (one.parts, list(one.components)) for one in found.executors} == {
        "a": (("vision",), ["smollm2-vision"]),
        "b": (("llm",), ["smollm2"]),
    }
    seen, told = found.services[0].paths
    assert [(step.parts, list(step.instances)) for step in seen.steps] == [
        (("vision",), ["a"]),
        (("llm",), ["b"]),
    ]
    assert [(step.parts, list(step.instances)) for step in told.steps] == [(("llm",), ["b"])]
    (note,) = found.notes
    assert note.startswith("assistant: planned to prefill apart")


def test_other_models_need_parts_or_a_stand_in() -> None:
    model = Catalog.default().model("qwen2.5-omni-7b")
    with pytest.raises(UsageError, match=r"nothing here runs the parts of qwen2\.5-omni-7b"):
        choose_parts("assistant", model, {}, stand_in=False)
    found = choose_parts("assistant", model, {}, stand_in=True)
    assert found == stand_in_parts(model)
    assert found.parts == {
        "vision": ("smollm2-vision",),
        "audio": ("silero-vad", "moonshine-encoder", "moonshine-decoder"),
        "llm": ("smollm2",),
        "talker": (),
        "vocoder": ("hibari",),
    }
    pictures = stand_in_parts(Catalog.default().model("qwen-image"))
    assert pictures.parts["dit"] == ("terrain-diffusion",)
    assert set(pictures.tasks) == {"images"}


def test_given_parts_must_be_all_parts_and_known_components(tmp_path: Path) -> None:
    model = Catalog.default().model(OWN_MODEL)
    path = tmp_path / "parts.yaml"
    path.write_text("services: {assistant: {parts: {llm: [smollm2]}}}\n")
    given = read_parts_file(path)
    with pytest.raises(UsageError, match="no component is named for the part 'vision'"):
        choose_parts("assistant", model, given, stand_in=False)
    path.write_text(
        "services: {assistant: {parts: {llm: [smolm2], vision: [], audio: [], speech: []},"
        " tasks: {chat: 'my.tasks:Chat'}}}\n"
    )
    with pytest.raises(AtollError, match="smolm2"):
        read_parts_file(path)


def test_parts_may_be_those_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "parts.yaml"
    path.write_text(
        "services: {assistant: {parts: {llm: {transformers-chat: {model: /m, max_batch: 4}},"
        " vision: {transformers-vision: {model: /m}}, audio: [whisper-encoder, whisper-decoder],"
        " speech: []}}}\n"
    )
    given = read_parts_file(path)
    served = given["assistant"]
    assert set(served.tasks) == {"chat", "transcriptions"}
    assert served.options == {
        "think": "transformers-chat",
        "see": "transformers-vision",
        "hear_encoder": "whisper-encoder",
        "hear_decoder": "whisper-decoder",
    }
    way = _path("text", ("llm", {"mind-0": 1.0}))
    plan = _plan(_executor("mind-0", "llm"), _executor("eyes-0", "vision+audio"), paths=(way,))
    executors = deployment_of(plan, ["assistant"], given).executors
    mind, eyes = sorted(executors, key=lambda each: each.id, reverse=True)
    assert mind.components == {"transformers-chat": {"model": "/m", "max_batch": 4}}
    assert eyes.components == {
        "transformers-vision": {"model": "/m"},
        "whisper-encoder": {},
        "whisper-decoder": {},
    }


def test_a_tasks_file_names_executors_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "services: {parts: {}}\n"
        "executors:\n"
        "  mind: {components: {smollm2: {max_length: 512}}, threads: 2}\n"
        "  mouth: {components: [hibari], copies: 2}\n"
    )
    found = read_tasks_file(path)
    assert [executor.id for executor in found.executors] == ["mind-0", "mouth-0", "mouth-1"]
    assert found.executors[0].components == {"smollm2": {"max_length": 512}}
    assert set(found.services[0].tasks) == {"chat", "speech"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("services: {a: {}}\nexecutors: {m: {components: [smol]}}\n", "smol"),
        ("services: {a: {}}\nexecutors: {m: {components: [silero-vad]}}\n", "none of the library"),
        ("services: {a: {}}\nexecutors: {m: {components: []}}\n", "components"),
        ("services: {a: {}}\nexecutors: {m: {components: [hibari], copies: 0}}\n", "copies"),
        (
            "services: {a: {tasks: {chatt: 'a:B'}}}\nexecutors: {m: {components: [hibari]}}\n",
            "chatt",
        ),
        ("executors: {m: {components: [hibari]}}\n", "services"),
    ],
)
def test_mistakes_in_a_tasks_file_are_one_line_with_its_place(
    tmp_path: Path, text: str, part: str
) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    with pytest.raises(AtollError, match=part) as caught:
        read_tasks_file(path)
    assert "\n" not in str(caught.value)
    assert "tasks.yaml" in str(caught.value)


def _shared_plan() -> Plan:
    """The eyes of the assistant work for a reader, too, which thinks by itself."""
    eyes = _executor("eyes", "vision").model_copy(
        update={"guests": (Guest(service="reader", per_s=0.5),)}
    )
    mind = _executor("mind", "llm").model_copy(
        update={"service": "reader", "role": "reader/llm/serve"}
    )
    path = _path("image+text", ("vision", {"eyes": 1.0}), ("llm", {"mind": 1.0}))
    return _plan(eyes, mind, paths=(path.model_copy(update={"service": "reader"}),))


def test_who_shares_an_executor_finds_it_on_its_paths() -> None:
    parts = {"assistant": own_parts(), "reader": own_parts()}
    made = deployment_of(_shared_plan(), ["reader"], parts)
    assert [executor.id for executor in made.executors] == ["eyes", "mind"]
    assert dict(made.executors[0].components) == {"smollm2-vision": {}}
    (reader,) = made.services
    addresses = [
        ExecutorAddress(id=one.id, address="x", components=tuple(one.components))
        for one in made.executors
    ]
    route = PathRouter(reader, addresses).route((("text", "image"), ("text",)))
    assert route.executors == {"smollm2-vision": "eyes", "smollm2": "mind"}
    # Who is another's alone is asked where none of one's own is there.
    third = ExecutorAddress(id="theirs", address="x", components=("smollm2",))
    router = PathRouter(reader, [*addresses, third])
    assert {router.assign("smollm2") for _ in range(4)} == {"mind"}
    assert router.assign("smollm2", {"mind"}) == "theirs"


def test_services_that_share_an_executor_name_the_same_components_for_it() -> None:
    other = own_parts().model_copy(update={"parts": {**own_parts().parts, "vision": ("minilm",)}})
    parts = {"assistant": own_parts(), "reader": other}
    with pytest.raises(UsageError, match="assistant and reader share vision, and name other"):
        deployment_of(_shared_plan(), ["assistant", "reader"], parts)
