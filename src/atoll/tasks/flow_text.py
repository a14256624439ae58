"""The flow of a task as lines of text and as plain data."""

from __future__ import annotations

from typing import Any

from atoll.tasks.flow import FlowStep, TaskFlow


def flow_data(flow: TaskFlow) -> dict[str, Any]:
    """Return a flow as JSON has it: steps by number, and who takes what of whom."""
    return {
        "task": flow.task,
        "request": flow.request,
        "reply": flow.reply,
        "ways": flow.ways,
        "steps": [
            {
                "number": step.number + 1,
                "unit": step.unit,
                "component": step.component,
                "streams": step.streams,
                "always": step.always,
                "repeats": step.repeats,
                "takes": [number + 1 for number in step.takes],
                "cuts": [number + 1 for number in step.cuts],
                "after": [number + 1 for number in step.after],
            }
            for step in flow.steps
        ],
        "answer": {name: [number + 1 for number in of] for name, of in flow.answer.items()},
        "notes": flow.notes,
    }


def depths(flow: TaskFlow) -> list[int]:
    """Return how many steps lie before each step at most, circles left out."""
    found = [-1] * len(flow.steps)

    def depth(number: int, above: frozenset[int]) -> int:
        if number in above:
            return -1
        if found[number] < 0:
            before = [
                *flow.steps[number].takes,
                *flow.steps[number].cuts,
                *flow.steps[number].after,
            ]
            found[number] = 1 + max(
                [depth(other, above | {number}) for other in before], default=-1
            )
        return found[number]

    return [depth(step.number, frozenset()) for step in flow.steps]


def describe_step(step: FlowStep) -> str:
    """Return what is to be said of a step besides its name."""
    said = []
    if not step.always:
        said.append("at times")
    if step.repeats:
        said.append("repeated")
    if step.cuts:
        said.append("for each piece")
    if step.streams:
        said.append("streams")
    return ", ".join(said)


def draw_flow(flow: TaskFlow) -> str:
    """Return a flow as a tree: every step under the last one it waits for, with what else it takes."""
    depth = depths(flow)
    below: dict[int, list[int]] = {}
    for step in flow.steps:
        before = [
            number
            for number in (*step.takes, *step.cuts, *step.after)
            if depth[number] < depth[step.number]
        ]
        parent = max(before, key=lambda number: (depth[number], -number), default=-1)
        below.setdefault(parent, []).append(step.number)
    lines = [f"{flow.task}: {flow.request} -> {flow.reply}", flow.request]
    for at, number in enumerate(below.get(-1, [])):
        _draw_step(flow, below, number, "", at == len(below[-1]) - 1, lines)
    if not flow.steps:
        lines.append("`- (no component)")
    lines.append(flow.reply)
    width = max(map(len, flow.answer), default=0)
    for name, of in flow.answer.items():
        source = ", ".join(_label(flow.steps[number]) for number in of) or "known at once"
        lines.append(f"   {name:<{width}}  <- {source}")
    return "\n".join([*lines, *(f"note: {note}" for note in flow.notes)])


def _label(step: FlowStep) -> str:
    return f"{step.number + 1} {step.component}"


def _draw_step(
    flow: TaskFlow,
    below: dict[int, list[int]],
    number: int,
    indent: str,
    is_last: bool,
    lines: list[str],
) -> None:
    step = flow.steps[number]
    facts = [f"({step.unit})"] if step.unit != step.component else []
    if said := describe_step(step):
        facts.append(said)
    links = [
        ("takes", step.takes),
        ("cuts", step.cuts),
        ("after looking at", step.after),
    ]
    facts += [f"{word} {', '.join(str(n + 1) for n in of)}" for word, of in links if of]
    head = [facts[0]] if facts and facts[0].startswith("(") else []
    tail = "; ".join(facts[len(head) :])
    text = " ".join([_label(step), *head]) + (f": {tail}" if tail else "")
    lines.append(f"{indent}{'`' if is_last else '|'}- {text}")
    children = below.get(number, [])
    for at, child in enumerate(children):
        deeper = indent + ("   " if is_last else "|  ")
        _draw_step(flow, below, child, deeper, at == len(children) - 1, lines)
