"""What targets listed last: absence in one answer is not death.

A target that has just been started anew, or whose answer was cut, may list nothing of what runs. An instance
that stood, that nobody told to end, and of which its target says nothing, counts as it was seen last until
several answers over `missing_s` agree and no gateway sends requests to it any more. What was seen is written
down, for the controller that follows: its first answer may be such a one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.target import InstanceState, InstanceStatus

_MIN_ANSWERS = 3
"""So many answers in a row must lack an instance, however far apart they are."""


class Sighting(Frozen):
    """An instance as a target listed it."""

    target: str
    handle: str
    labels: Labels
    state: InstanceState
    since_s: float


class SightingsFile(Frozen):
    """All that targets listed."""

    seen: tuple[Sighting, ...] = ()


class Sightings:
    """The instances that each target has listed, and since when those that it does not list are missing."""

    def __init__(self, path: Path, missing_s: float, is_known: Callable[[str], bool]) -> None:
        """Begin with what the file says of instances that `is_known`: others were ended for good."""
        self._path, self._missing_s = path, missing_s
        self._written = read_sightings(path)
        self._listed: dict[str, tuple[InstanceStatus, ...]] = {}
        for one in self._written.seen:
            if is_known(one.labels.instance):
                status = InstanceStatus(one.handle, one.labels, one.state, one.since_s)
                self._listed[one.target] = (*self._listed.get(one.target, ()), status)
        self._missed: dict[str, tuple[int, float]] = {}
        self._ended: set[str] = set()

    def end(self, instance: str) -> None:
        """Note that an instance was told to end: where it is not listed any more, it is gone."""
        self._ended.add(instance)

    def hear(
        self,
        target: str,
        listed: Sequence[InstanceStatus],
        now_s: float,
        serving: Collection[str] = (),
    ) -> None:
        """Take what a target lists, and what it listed before and has said nothing of since.

        `serving` are the instances that answer requests.
        """
        found = {each.labels.instance for each in listed}
        for name in found:
            self._missed.pop(name, None)
        held = [
            replace(each, reason=f"{target} has not listed it for {now_s - since_s:.0f} s")
            for each in self._listed.get(target, ())
            if each.labels.instance not in found
            and (since_s := self._miss(each, now_s, serving)) is not None
        ]
        self._listed[target] = (*listed, *held)

    def write(self) -> None:
        """Write down what stands, where that has changed."""
        seen = SightingsFile(
            seen=tuple(
                Sighting(
                    target=target,
                    handle=each.handle,
                    labels=each.labels,
                    state=each.state,
                    since_s=each.since_s,
                )
                for target, listed in sorted(self._listed.items())
                for each in listed
                if each.state != "gone"
            )
        )
        if seen != self._written:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._path, seen.to_json() + "\n")
            self._written = seen

    def by_target(self) -> dict[str, tuple[InstanceStatus, ...]]:
        """Return what stands on each target, as far as is known."""
        return self._listed

    def _miss(self, status: InstanceStatus, now_s: float, serving: Collection[str]) -> float | None:
        """Return since when an instance is missing, None where it counts as gone."""
        name = status.labels.instance
        if status.state not in ("starting", "ready") or name in self._ended:
            return None
        answers, since_s = self._missed.get(name, (0, now_s))
        self._missed[name] = answers + 1, since_s
        agreed = answers + 1 >= _MIN_ANSWERS and now_s - since_s >= self._missing_s
        if agreed and name not in serving:
            del self._missed[name]
            return None
        return since_s


def read_sightings(path: Path) -> SightingsFile:
    """Return what was written; nothing where that cannot be read: then the next answer is all there is."""
    try:
        return SightingsFile.from_json(read_text_limited(path))
    except InputError:
        return SightingsFile()
