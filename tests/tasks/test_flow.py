"""What flows between components, found without running any."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

from atoll.tasks.flow import TaskFlow, find_flow
from atoll.tasks.flow_text import draw_flow, draw_svg
from atoll.tasks.library.assistant import SpeakingAssistant
from atoll.tasks.library.embedding import Embedding
from atoll.tasks.task import Task, UnitTask, choose


def edges(flow: TaskFlow) -> set[tuple[str, str, str]]:
    names = {step.number: step.component for step in flow.steps}
    return {
        (names[number], kind, step.component)
        for step in flow.steps
        for kind, numbers in (("takes", step.takes), ("cuts", step.cuts), ("after", step.after))
        for number in numbers
    }


def test_the_assistant() -> None:
    flow = find_flow(SpeakingAssistant())
    assert edges(flow) == {
        ("moonshine-encoder", "takes", "moonshine-decoder"),
        ("moonshine-decoder", "takes", "smollm2"),
        ("smollm2-vision", "takes", "smollm2"),
        ("smollm2", "cuts", "hibari"),
    }
    names = {step.number: step.component for step in flow.steps}
    assert {name: [names[number] for number in of] for name, of in flow.answer.items()} == {
        "text": ["smollm2"],
        "audio": ["hibari"],
        "heard": ["moonshine-decoder"],
    }
    assert [step.component for step in flow.steps if step.always] == ["smollm2"]
    assert not flow.notes
    flow = find_flow(SpeakingAssistant({"voice_activity": True}))
    assert ("silero-vad", "after", "moonshine-encoder") in edges(flow)
    assert "`- 4 hibari (speak): at times, for each piece, streams; cuts 3" in draw_flow(
        find_flow(SpeakingAssistant())
    )


class Agent(Task[Any, Any]):
    """A loop on results, a choice, and a way that raises."""

    def setup(self) -> None:
        self.think = UnitTask("think", streams=True)
        self.tool = UnitTask("tool")
        self.other = UnitTask("other")

    def invoke(self, request: Any) -> Any:
        thought = self.think(messages=[request["text"]])
        for _ in range(3):
            if "done" in thought:
                return {"said": thought, "by": ["agent"]}
            seen = self.tool(call=str(thought)) if choose(2) else self.other(call=thought["a"])
            thought = self.think(messages=[request["text"], seen])
        if request["strict"]:
            raise ValueError("no answer")
        return {"said": thought}


def test_loops_choices_and_ways_that_fail() -> None:
    flow = find_flow(Agent())
    assert ("think", "takes", "other") in edges(flow)
    assert ("think", "after", "tool") in edges(
        flow
    )  # by way of a text, which forgets where it is from
    assert {("tool", "takes", "think"), ("other", "takes", "think")} <= edges(flow)
    first, *rest = flow.steps
    assert first.always
    assert not any(step.always for step in rest)
    assert any(step.repeats for step in flow.steps)
    (note,) = flow.notes
    assert "could not be followed: ValueError: no answer" in note
    draw_flow(flow)


def test_pictures_are_well_formed() -> None:
    flow = find_flow(SpeakingAssistant())
    flow.steps[0].component = "<b>&"
    root = ET.fromstring(draw_svg(flow))
    assert len(root.findall(".//{*}rect")) == 1 + len(flow.steps) + len(flow.answer)
    assert "<b>&" in [text.text for text in root.findall(".//{*}text")]
    ET.fromstring(draw_svg(find_flow(Embedding())))


def test_a_task_without_components() -> None:
    class Plain(Task[str, str]):
        def invoke(self, request: str) -> str:
            return request

    flow = find_flow(Plain())
    assert draw_flow(flow).splitlines() == [
        "Plain: str -> str",
        "str",
        "`- (no component)",
        "str",
        "   answer  <- known at once",
    ]
    ET.fromstring(draw_svg(flow))
