"""What runs an instance of a plan on this machine, and why that where it is not what was planned."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.core.frozen import Frozen
from atoll.plan.plan import format_gpus


class InstanceRunner(Frozen):
    """An engine on GPUs of this machine, by the driver's numbers, or on its cores.

    Without an engine the instance is left out, and others of its service take its requests. `planned` is
    what it was planned for ("L40S:2"), `gpu` the kind that it runs on, `tp` how many GPUs split a layer.
    `reason` says why it runs otherwise than planned; "": it does not.
    """

    instance: str
    service: str
    planned: str
    model: str = ""
    engine: str = ""
    gpu: str = ""
    gpus: tuple[int, ...] = ()
    tp: int = 1
    reason: str = ""

    def describe(self) -> str:
        """Return it in a line without the instance's name: "on cores with qwen3-32b because ..."."""
        because = f" because {self.reason}" if self.reason else ""
        if not self.engine:
            return f"left out{because}"
        if not self.gpus:
            return f"on cores with {self.model}{because}"
        named = f"GPU{'s' if len(self.gpus) > 1 else ''} {format_gpus(self.gpus)}"
        split = f" TP {self.tp}" if self.tp > 1 else ""
        return f"on {len(self.gpus)}x {self.gpu} ({named}) with {self.engine}{split}{because}"


def list_lines(runners: Iterable[InstanceRunner]) -> list[str]:
    """Return a line for each way in which instances run, with all that run so: "chat-0 runs on ..."."""
    alike: dict[str, list[str]] = {}
    for runner in runners:
        # What runs on cores as planned is no news.
        if runner.gpus or runner.reason:
            alike.setdefault(runner.describe(), []).append(runner.instance)
    return [f"{', '.join(names)} {_verb(told, len(names))}{told}" for told, names in alike.items()]


def _verb(told: str, count: int) -> str:
    if told.startswith("left out"):
        return "is " if count == 1 else "are "
    return "runs " if count == 1 else "run "
