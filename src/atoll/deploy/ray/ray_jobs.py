"""Jobs of a Ray cluster as instances: what a record of a job and its log say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import InputError, shorten
from atoll.deploy.labels import Labels
from atoll.deploy.ray.ray_package import STATE_PREFIX, RayState
from atoll.deploy.target import FailureKind, InstanceState, InstanceStatus
from atoll.plan.plan import Instance

LABELS = "atoll.labels"
INSTANCE = "atoll.instance"
STOPS = "atoll.stops"
"""Names in the metadata of a job: of an instance its labels and what it is; of `ray_stop` its fleet."""
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
STOP_SUFFIX = "-stop"
MAX_NAME_CHARACTERS = 100
_MAX_REASON_CHARACTERS = 300
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_IMAGE_WORDS = ("modulenotfounderror", "no module named", "exit code 127", "runtime_env setup")
"""Words of a job that ended before Atoll's own program began: what it needs is not on the machines."""


@dataclass(frozen=True, slots=True)
class RayJobRecord:
    """A job of an instance: its id, its status in Ray's words, and the message of one that ended."""

    id: str
    status: str
    labels: Labels
    instance: Instance | None
    message: str
    start_s: float
    end_s: float

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in ENDED


def name_job(labels: Labels) -> str:
    """Return the id of an instance's job: readable, and no other instance's."""
    import hashlib

    # Names that are cut or cleaned may be equal; with this they are not.
    mark = hashlib.sha256(f"{labels.fleet}\0{labels.instance}".encode()).hexdigest()[:12]
    shown = _NOT_IN_NAMES.sub("-", f"{labels.fleet}-{labels.instance}")
    return f"atoll-{shown[: MAX_NAME_CHARACTERS - 19]}-{mark}"


def read_jobs(jobs: Iterable[Mapping[str, Any]]) -> tuple[RayJobRecord, ...]:
    """Return the jobs that are instances of Atoll, in the order of their ids."""
    found = []
    for job in jobs:
        metadata = job.get("metadata") or {}
        if LABELS not in metadata:
            continue
        try:
            labels = Labels.from_json(metadata[LABELS])
            told = metadata.get(INSTANCE)
            instance = None if told is None else Instance.from_json(told)
        except InputError:
            continue  # somebody else's, under our name
        found.append(
            RayJobRecord(
                id=str(job["submission_id"]),
                status=str(job.get("status")),
                labels=labels,
                instance=instance,
                message=str(job.get("message") or ""),
                start_s=float(job.get("start_time") or 0) / 1e3,
                end_s=float(job.get("end_time") or job.get("start_time") or 0) / 1e3,
            )
        )
    return tuple(sorted(found, key=lambda record: record.id))


def read_state(text: str) -> RayState | None:
    """Return the last state in a job's log; None if it says none."""
    for line in reversed(text.splitlines()):
        if line.startswith(STATE_PREFIX):
            try:
                return RayState.from_json(line.removeprefix(STATE_PREFIX))
            except InputError:
                continue  # cut in the middle, or still being written
    return None


def judge_job(record: RayJobRecord, log: str, *, stopped: bool) -> InstanceStatus:
    """Return an instance as its job's record and log tell it; `stopped`: it was ended at once."""
    said = read_state(log)
    state: InstanceState
    kind: FailureKind | None = None
    since_s, reason = record.start_s, ""
    if record.status in ("STOPPED", "SUCCEEDED"):
        state, since_s = "gone", record.end_s
        reason = "was stopped" if stopped else "was drained"
    elif record.status == "FAILED":
        state, since_s = "failed", record.end_s
        if said is not None and said.state == "failed":
            reason, kind = said.reason, said.kind
        else:
            reason, kind = _explain_end(record.message)
    elif said is None:
        state, reason = "starting", "its job begins"
    else:
        # The job says gone or failed a moment before Ray knows that it has ended.
        over = said.state in ("gone", "failed")
        state, since_s, reason = "draining" if over else said.state, said.since_s, said.reason
    return InstanceStatus(
        record.id,
        record.labels,
        state,
        since_s,
        reason=reason,
        kind=kind,
        hosts=tuple(dict.fromkeys(each.host for each in said.nodes)) if said is not None else (),
        instance=record.instance,
    )


def _explain_end(message: str) -> tuple[str, FailureKind]:
    """Return why a job ended that left no state."""
    words = message.lower()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    last = shorten(lines[-1], _MAX_REASON_CHARACTERS) if lines else "its job ended without a word"
    if any(each in words for each in _IMAGE_WORDS):
        return f"its job could not begin: {last}", "image"
    return f"its job ended: {last}", "ended"
