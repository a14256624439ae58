"""Jobs as `squeue --json` tells of them, in the shapes of Slurm 22.05 and of 23.02 and later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from atoll.core.errors import InputError, shorten
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.target import DeployError

MAX_COMMENT_BYTES = 1024
"""Longest comment that slurmctld takes, in bytes."""
UNLIMITED_MINUTES = 365 * 24 * 60
"""Minutes left that Slurm reports for a running job without a limit."""
_MAX_HOSTS = 100_000
_LONGEST_ERROR = 200


class JobComment(Frozen):
    """Content of a job's comment: whose it is, and how long it may take to become ready."""

    atoll: int = Field(default=1, ge=1, le=1)
    ready_s: float
    labels: Labels


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job, or one component of a heterogeneous one, of which `leader` is the job's own name.

    `states` holds the state and its flags ("RUNNING", "COMPLETING"). Times are Unix seconds, None where they
    are not known; `limit_minutes` is None without a limit. `gres` is what it holds of each host, in order.
    """

    id: int
    leader: int
    offset: int
    comment: JobComment | None
    states: frozenset[str]
    reason: str
    exit_code: int | None
    signal: int | None
    submit_s: float | None
    start_s: float | None
    end_s: float | None
    limit_minutes: int | None
    hosts: tuple[str, ...]
    gres: tuple[str, ...]


def write_comment(comment: JobComment) -> str:
    """Return labels as a job carries them: one line of ASCII; DeployError where Slurm would not take it."""
    text = json.dumps(comment.model_dump(mode="json"), separators=(",", ":"))
    text = text.replace("'", "\\u0027").replace(
        "\x7f", "\\u007f"
    )  # as sbatch can read it in a script
    if len(text) > MAX_COMMENT_BYTES:
        raise DeployError(
            f"the labels of {comment.labels.instance} take {len(text)} bytes, "
            f"and a job's comment holds {MAX_COMMENT_BYTES}",
            kind="settings",
            hint="use shorter names",
        )
    return text


def read_comment(text: str) -> JobComment | None:
    """Return the labels in a job's comment, None where it is not one of Atoll's."""
    if not text.startswith('{"atoll":'):
        return None
    try:
        return JobComment.from_json(text)
    except InputError:
        return None


def read_jobs(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs in the output of `squeue --json` that carry Atoll's labels, in order of number."""
    rows = read_rows(text, "jobs", "squeue")
    jobs = (_job(row) for row in rows if str(row.get("comment") or "").startswith('{"atoll":'))
    return tuple(
        sorted(
            (job for job in jobs if job.comment is not None),
            key=lambda job: (job.leader, job.offset),
        )
    )


def read_rows(text: str, key: str, command: str) -> Sequence[Mapping[str, object]]:
    """Return the objects under a key of a command's JSON.

    DeployError where it says that it failed: Slurm 22.05 ends well then, with errors and an empty list.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DeployError(
            f"{command} --json did not answer in JSON",
            kind="unreachable",
            hint="Slurm 21.08 or later, built with its JSON serialiser, is needed",
        ) from error
    rows = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, dict) and data.get("errors"):
        raise DeployError(
            f"{command} --json failed: {_read_error(data['errors'])}", kind="unreachable"
        )
    if not isinstance(rows, list):
        raise DeployError(f"{command} --json says nothing of {key}", kind="unreachable")
    return [row for row in rows if isinstance(row, dict)]


def _read_error(errors: object) -> str:
    """Return the first of a command's errors in a few words: its own, else those of what was called."""
    first = errors[0] if isinstance(errors, list) else errors
    if not isinstance(first, Mapping):
        return shorten(str(first), _LONGEST_ERROR)
    words = (first.get(key) for key in ("error", "description", "source"))
    said = next((str(word) for word in words if word), "it does not say why")
    return shorten(" ".join(said.split()), _LONGEST_ERROR)


def _job(row: Mapping[str, object]) -> SlurmJob:
    number = read_number(row.get("job_id")) or 0
    exit_code, signal = _read_exit(row.get("exit_code"))
    gres = row.get("gres_detail")
    limit = read_number(row.get("time_limit")) or UNLIMITED_MINUTES
    return SlurmJob(
        id=number,
        leader=read_number(row.get("het_job_id")) or number,
        offset=read_number(row.get("het_job_offset")) or 0,
        comment=read_comment(str(row.get("comment") or "")),
        states=read_words(row.get("job_state")),
        reason=str(row.get("state_reason") or "None"),
        exit_code=exit_code,
        signal=signal,
        submit_s=read_number(row.get("submit_time")) or None,
        start_s=read_number(row.get("start_time")) or None,
        end_s=read_number(row.get("end_time")) or None,
        limit_minutes=limit if limit < UNLIMITED_MINUTES else None,
        hosts=expand_hosts(str(row.get("nodes") or "")),
        gres=tuple(str(each) for each in gres) if isinstance(gres, list) else (),
    )


def read_number(value: object) -> int | None:
    """Return a number, given alone or as {"set": true, "infinite": false, "number": 5}; None: no bound."""
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    return int(value) if isinstance(value, int | float) else None


def read_words(value: object) -> frozenset[str]:
    """Return words given alone ("idle") or as a list (["IDLE", "DRAIN"]), in capitals."""
    words = value if isinstance(value, list) else [value]
    return frozenset(str(word).upper() for word in words if word)


def _read_exit(value: object) -> tuple[int | None, int | None]:
    """Return exit code and signal, from a status of wait() or the object of later versions."""
    if isinstance(value, Mapping):
        signal = value.get("signal")
        number = signal.get("id", signal.get("signal_id")) if isinstance(signal, Mapping) else None
        return read_number(value.get("return_code")), read_number(number) or None
    status = read_number(value)
    if status is None:
        return None, None
    return (status >> 8) & 0xFF, (status & 0x7F) or None


_GROUP = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts that "n[1-3,07],gpu-a" stands for, in its order."""
    hosts: list[str] = []
    for group in _GROUP.findall(text):
        if group and group not in ("(null)", "None assigned"):
            hosts += _expand(group, _MAX_HOSTS - len(hosts))
    return tuple(hosts)


def _expand(group: str, most: int) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group][:most]
    ranges, _, tail = rest.partition("]")
    names: list[str] = []
    tails = _expand(tail, most) if tail else [""]
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            numbers: Sequence[str] = (part,)
        else:
            last = min(int(high or low), int(low) + most)
            numbers = [str(n).zfill(len(low)) for n in range(int(low), last + 1)]
        names += [f"{head}{number}{end}" for number in numbers for end in tails]
        if len(names) > most:
            break
    return names[:most]
