"""Slurm's words for states, reasons and refusals, as one line and a kind of failure.

Slurm has no codes for these that a program could read: its commands exit with 1 and print a sentence. The
tables below are those sentences and words; what is not among them is passed on as it is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from atoll.deploy.target import FailureKind


class SlurmVerdict(NamedTuple):
    """A line for a person, and what kind of failure it is; None where it is none, or not yet."""

    line: str
    kind: FailureKind | None


_WAITING: dict[str, SlurmVerdict] = {
    "None": SlurmVerdict("waits to be looked at by the scheduler", None),
    "Resources": SlurmVerdict("waits for nodes to become free", None),
    "Priority": SlurmVerdict("waits behind jobs of higher priority", None),
    "Reservation": SlurmVerdict("waits for its reservation", None),
    "BeginTime": SlurmVerdict("waits for its time of start", None),
    "Prolog": SlurmVerdict("its nodes are being prepared", None),
    "NodeDown": SlurmVerdict("waits for a node that is down", "capacity"),
    "ReqNodeNotAvail": SlurmVerdict("the nodes it needs are down or reserved", "capacity"),
    "PartitionDown": SlurmVerdict("the partition is down", "capacity"),
    "PartitionInactive": SlurmVerdict("the partition is inactive", "capacity"),
    "PartitionNodeLimit": SlurmVerdict("asks for more nodes than the partition allows", "settings"),
    "PartitionTimeLimit": SlurmVerdict("asks for more time than the partition allows", "settings"),
    "PartitionConfig": SlurmVerdict("the partition does not allow what it asks for", "settings"),
    "BadConstraints": SlurmVerdict("no node has what its constraint asks for", "settings"),
    "AccountNotAllowed": SlurmVerdict("the account may not use the partition", "settings"),
    "QOSNotAllowed": SlurmVerdict("the qos may not be used there", "settings"),
    "InvalidAccount": SlurmVerdict("the account is not valid", "settings"),
    "InvalidQOS": SlurmVerdict("the qos is not valid", "settings"),
    "Licenses": SlurmVerdict("waits for licences", None),
    "JobHeldUser": SlurmVerdict("was held by its user", "settings"),
    "JobHeldAdmin": SlurmVerdict("was held by an administrator", "quota"),
    "DependencyNeverSatisfied": SlurmVerdict(
        "waits for a job that will never end well", "settings"
    ),
    "JobLaunchFailure": SlurmVerdict("could not be launched on its nodes", "capacity"),
}
_QUOTA = re.compile(r"(Assoc|QOS|MaxJobs|MaxMem|MaxGRES|MaxTRES).*")
"""AssocGrpGRES, QOSMaxGRESPerUser, ...: a limit of an account, a user or a qos."""

_ENDED: dict[str, SlurmVerdict] = {
    "COMPLETED": SlurmVerdict("its commands ended by themselves", "ended"),
    # Nothing failed: somebody, or a limit that was known, ended it.
    "CANCELLED": SlurmVerdict("was cancelled", None),
    "TIMEOUT": SlurmVerdict("its wall time ended", None),
    "DEADLINE": SlurmVerdict("its deadline passed", None),
    "PREEMPTED": SlurmVerdict("was preempted", "capacity"),
    "NODE_FAIL": SlurmVerdict("a node of it failed", "ended"),
    "BOOT_FAIL": SlurmVerdict("its nodes did not boot", "capacity"),
    "OUT_OF_MEMORY": SlurmVerdict("ran out of memory", "memory"),
    "REVOKED": SlurmVerdict("was revoked by another cluster", "ended"),
}
ENDED_STATES = frozenset((*_ENDED, "FAILED"))
FAILED_STATES = frozenset(("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL"))
"""Ends that are the job's or its order's own fault."""

_REFUSALS: tuple[tuple[str, FailureKind], ...] = (
    ("invalid account", "settings"),
    ("invalid partition", "settings"),
    ("invalid qos", "settings"),
    ("invalid feature", "settings"),
    ("invalid generic resource", "settings"),
    ("access/permission denied", "settings"),
    ("time limit specification required", "settings"),
    ("requested time limit is invalid", "settings"),
    ("violates accounting/qos policy", "quota"),
    ("exceeded", "quota"),
    ("too many jobs", "quota"),
    ("node count specification invalid", "capacity"),
    ("requested node configuration is not available", "capacity"),
    ("requested nodes are busy", "capacity"),
    ("partition(s) are down", "capacity"),
    ("unable to contact slurm controller", "unreachable"),
    ("socket timed out", "unreachable"),
    ("unable to connect", "unreachable"),
    ("zero bytes were transmitted", "unreachable"),
    ("connection refused", "unreachable"),
    ("could not establish a configuration source", "unreachable"),
    ("authentication", "unreachable"),
    ("munge", "unreachable"),
)
_PREFIX = re.compile(r"^(?:sbatch|squeue|sinfo|scancel|sacct|scontrol): (?:error|fatal): ")


def explain_waiting(reason: str) -> SlurmVerdict:
    """Return what a pending job waits for, and the kind of failure where waiting does not help."""
    # ReqNodeNotAvail and its like may be followed by names of nodes.
    word = re.split(r"[,\s(]", reason.strip(), maxsplit=1)[0] or "None"
    known = _WAITING.get(word)
    if known is not None:
        return SlurmVerdict(f"{known.line} ({word})", known.kind)
    if _QUOTA.fullmatch(word):
        return SlurmVerdict(f"a limit of the account, user or qos is reached ({word})", "quota")
    return SlurmVerdict(f"waits ({word})", None)


def explain_end(state: str, reason: str, exit_code: int | None, signal: int | None) -> SlurmVerdict:
    """Return why a job ended, from its state, Slurm's reason and how its script ended."""
    if reason == "JobLaunchFailure":
        return _WAITING[reason]
    if state != "FAILED":
        return _ENDED.get(state, SlurmVerdict(f"ended ({state})", "ended"))
    return explain_exit("its script", exit_code, signal)


def explain_exit(who: str, exit_code: int | None, signal: int | None = None) -> SlurmVerdict:
    """Return what the end of a command says: 127 and 126 are programs that are not there."""
    if exit_code in (126, 127):
        return SlurmVerdict(f"{who} could not run its program (exit {exit_code})", "image")
    if signal:
        return SlurmVerdict(f"{who} was ended by signal {signal}", "ended")
    if exit_code is None:
        return SlurmVerdict(f"{who} failed", "ended")
    return SlurmVerdict(f"{who} ended with exit {exit_code}", "ended")


def explain_refusal(err: str) -> SlurmVerdict:
    """Return why a command refused, from what it printed: its last error without the program's name."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    said = [_PREFIX.sub("", line) for line in lines if _PREFIX.match(line)] or lines
    # The first error is the one with the name in it ("invalid partition specified: x").
    line = "; ".join(dict.fromkeys(said[:2])) or "it said nothing"
    folded = err.lower()
    kinds = (kind for words, kind in _REFUSALS if words in folded)
    return SlurmVerdict(line[:300], next(kinds, "settings"))
