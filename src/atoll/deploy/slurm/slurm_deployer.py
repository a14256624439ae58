"""Slurm as a target: every instance is a job of the user who runs this.

A job carries its labels in its comment, so that squeue is the list of what stands. What Slurm forgets minutes
after a job's end, and what it never knows (is it ready, is it draining), stands in the job's folder.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.deploy.labels import Labels
from atoll.deploy.slurm.job_folders import JobEnd, JobHome, JobRecord, WorkFolder
from atoll.deploy.slurm.reasons import (
    ENDED_STATES,
    FAILED_STATES,
    SlurmVerdict,
    explain_end,
    explain_exit,
    explain_refusal,
    explain_waiting,
)
from atoll.deploy.slurm.runner import ProcessRunner, SlurmAnswer, SlurmRunner
from atoll.deploy.slurm.script import JobComponent, group_machines, write_script
from atoll.deploy.slurm.slurm_jobs import SlurmJob, read_jobs
from atoll.deploy.slurm.slurm_pool import (
    GpuChoice,
    SlurmNode,
    SlurmPool,
    has_nodes,
    read_nodes,
    read_partitions,
)
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import (
    DeployError,
    InstanceState,
    InstanceStatus,
    StartOrder,
    classify_exit,
)
from atoll.plan.problem import Offer

DRAINING = "draining"
STOPPED = "stopped"
DISMISSED = "dismissed"
"""Stopped after it had ended by itself: nothing more is expected of it, and its own reason stays."""
MISSING = "missing"
"""Not in Slurm's queue, and nobody says that it ended: an answer of Slurm's may lack what runs."""


class SlurmDeployer:
    """Brings instances up as Slurm jobs; see `SlurmSettings` for what can be set."""

    def __init__(
        self,
        settings: SlurmSettings,
        *,
        name: str = "slurm",
        runner: SlurmRunner | None = None,
        catalog: Catalog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._settings = settings
        self._runner: SlurmRunner = runner if runner is not None else ProcessRunner()
        self._catalog = catalog
        self._clock = clock
        self._work = WorkFolder(settings.work_folder)
        self._leaving: dict[str, float] = {}

    # What there is

    def offers(self) -> Sequence[Offer]:
        """Return the nodes that can be had now, those that Atoll's own jobs hold included."""
        return self._pool().list_offers(job for job in self._jobs() if not _has_ended(job))

    def notes(self) -> tuple[str, ...]:
        """Return a line about what of the cluster is not offered and why."""
        return self._pool().notes

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return the jobs of a fleet, and those that ended a short while ago, in the order of instances."""
        jobs = _by_leader(self._jobs(), fleet)
        if any(job.hosts for group in jobs for job in group):
            self._look_at_nodes()
        found = {group[0].leader: self._observe(group) for group in jobs}
        instances = {status.labels.instance for status in found.values()}
        for home in self._work.homes(fleet):
            record = home.read()
            if record is None or record.labels.instance in instances:
                continue
            status = self._remember(home, record)
            if status is not None:
                found[int(status.handle)] = status
        recent_s = self._clock() - self._settings.keep_s
        listed = (
            each
            for each in found.values()
            if each.state not in ("gone", "failed") or each.since_s >= recent_s
        )
        return tuple(sorted(listed, key=lambda each: (each.labels.instance, int(each.handle))))

    # Orders

    def dry_run(self, order: StartOrder) -> str:
        """Return the batch script of an order; submits nothing."""
        return self._write(order)

    def start(self, order: StartOrder) -> InstanceStatus:
        """Submit an instance's job; one that was submitted before, perhaps unnoticed, is returned."""
        labels = order.labels
        with self._work.fence(labels.fleet, labels.term, deadline_s=self._settings.deadline_s):
            status = self._find(labels)
            if status is not None:
                return status
            script = self._write(order)
            home = self._work.home(labels.fleet, labels.instance)
            record = JobRecord(
                labels=labels,
                nodes=tuple(command.node for command in order.commands),
                ordered_s=self._clock(),
                ready_s=order.ready_s,
                instance=order.instance,
            )
            path = home.prepare(record, order.commands, script)
            try:
                number = self._submit(str(path), str(home.path))
            except DeployError as error:
                # Slurm may have taken the job although sbatch did not answer in time.
                status = self._find(labels) if error.kind == "unreachable" else None
                if status is None:
                    # Where Slurm may have taken it after all, its secrets must stay; the next look finds it.
                    if error.kind != "unreachable":
                        home.drop_secrets()
                    raise
                return status
            home.write(record.model_copy(update={"job": number}))
            return InstanceStatus(
                str(number),
                labels,
                "starting",
                record.ordered_s,
                reason="was submitted just now",
                instance=order.instance,
            )

    def drain(self, handle: str, term: int) -> None:
        """Have the nodes of a job finish what runs; one that waits for nodes is cancelled."""
        jobs = self._of_handle(handle)
        if not jobs:
            return
        labels = _labels(jobs[0])
        with self._work.fence(labels.fleet, term, deadline_s=self._settings.deadline_s):
            home = self._work.home(labels.fleet, labels.instance)
            if home.marked_s(DRAINING) is not None or home.marked_s(STOPPED) is not None:
                return
            if "PENDING" in jobs[0].states:
                # Marked first, so that the end that follows reads as asked for.
                home.mark(STOPPED, self._clock())
                self._cancel(handle)
            else:
                # Marked last, so that an order whose signal failed may be given again.
                self._cancel(handle, "--signal=TERM", "--batch")
                home.mark(DRAINING, self._clock())

    def stop(self, handle: str, term: int) -> None:
        """Cancel a job; Slurm kills what has not ended after its KillWait."""
        jobs = self._of_handle(handle)
        record = self._record_of(handle)
        if jobs:
            labels = _labels(jobs[0])
        elif record is not None:
            labels = record.labels
        else:
            return
        with self._work.fence(labels.fleet, term, deadline_s=self._settings.deadline_s):
            home = self._work.home(labels.fleet, labels.instance)
            # What completes has ended by itself: its own reason stays. What the queue lacks may run yet.
            is_missing = not jobs and record is not None and record.end is None
            stands = is_missing or any("COMPLETING" not in job.states for job in jobs)
            if home.path.is_dir():
                home.mark(STOPPED if stands else DISMISSED, self._clock())
            if stands:
                self._cancel(handle)
            elif not jobs:
                home.drop_secrets()

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of every node of a job and of Slurm about it."""
        record = self._record_of(handle)
        if record is None:
            raise DeployError(f"there is no job {handle} of Atoll", kind="ended")
        home = self._work.home(record.labels.fleet, record.labels.instance)
        return home.tail(record.nodes, lines)

    # Asking Slurm

    def _ask(self, *argv: str) -> str:
        answer = self._run(*argv)
        if answer.code != 0:
            raise _refused(argv[0], answer)
        return answer.out

    def _run(self, *argv: str) -> SlurmAnswer:
        answer = self._runner.run(argv, deadline_s=self._settings.deadline_s)
        if answer.timed_out:
            raise DeployError(
                f"{argv[0]} did not end within {self._settings.deadline_s:g} s", kind="unreachable"
            )
        return answer

    def _jobs(self) -> tuple[SlurmJob, ...]:
        jobs = read_jobs(self._ask("squeue", "--json", "--me", "--states=all"))
        if not any(_has_ended(job) for job in jobs):
            return jobs
        # In the JSON of 22.05 a cancelled job has ended while its processes still do. Asked second, so
        # that what is not among these has ended for good.
        text = self._ask("squeue", "--noheader", "--me", "--states=completing", "--format=%A")
        ending = {int(word) for word in text.split() if word.isdigit()}
        return tuple(
            replace(job, states=job.states | {"COMPLETING"}) if job.id in ending else job
            for job in jobs
        )

    def _pool(self) -> SlurmPool:
        nodes = self._nodes()
        partitions = self._ask("scontrol", "--all", "--oneliner", "show", "partition")
        return SlurmPool(self._settings, nodes, read_partitions(partitions), self._catalog)

    def _nodes(self) -> tuple[SlurmNode, ...]:
        text = self._ask("sinfo", "--json")
        if not has_nodes(text):
            text = self._ask("scontrol", "show", "nodes", "--json")
        return read_nodes(text)

    def _look_at_nodes(self) -> None:
        """Note which nodes are to be empty, and since when; what cannot be asked is as it was."""
        with contextlib.suppress(DeployError):
            now_s = self._clock()
            self._leaving = {
                node.name: node.leaving_s or self._leaving.get(node.name, now_s)
                for node in self._nodes()
                if node.leaving_s is not None
            }

    def _submit(self, path: str, folder: str) -> int:
        text = self._ask("sbatch", "--parsable", f"--chdir={folder}", path)
        # What it prints is JOB or JOB;CLUSTER, on the last line.
        number = text.strip().splitlines()[-1].partition(";")[0] if text.strip() else ""
        if not number.isdigit():
            raise DeployError("sbatch did not say which job it submitted", kind="unreachable")
        return int(number)

    def _cancel(self, handle: str, *options: str) -> None:
        answer = self._run("scancel", *options, handle)
        # A job that has ended meanwhile cannot be signalled, which is what was asked for.
        if answer.code != 0 and not self._has_gone(handle):
            raise _refused("scancel", answer)

    def _has_gone(self, handle: str) -> bool:
        return not self._of_handle(handle)

    def _of_handle(self, handle: str) -> tuple[SlurmJob, ...]:
        """The components of a job that has not ended, the first one first."""
        return tuple(
            job for job in self._jobs() if str(job.leader) == handle and not _has_ended(job)
        )

    # Writing

    def _write(self, order: StartOrder) -> str:
        components = group_machines(order)
        pool = self._pool()
        # Hosts of other targets may be among them; sbatch refuses a name it does not know.
        avoided = pool.hosts & set(order.avoid_hosts)
        choices = [self._choose(pool, component, avoided) for component in components]
        home = self._work.home(order.labels.fleet, order.labels.instance)
        return write_script(
            order, components, choices, self._settings, str(home.path), exclude=sorted(avoided)
        )

    def _choose(
        self, pool: SlurmPool, component: JobComponent, avoided: frozenset[str]
    ) -> GpuChoice:
        first = component.first
        if first.host is not None and first.host not in pool.hosts:
            raise DeployError(f"Slurm has no node {first.host}", kind="settings")
        if first.host in avoided:
            raise DeployError(f"node {first.host} is set aside", kind="capacity")
        gpu = None if first.gpu is None else _canonical(first.gpu, self._catalog)
        return pool.choose(gpu, first.gpus, first.market, len(component.machines), avoided)

    # Looking

    def _find(self, labels: Labels) -> InstanceStatus | None:
        """The instance as it stands or stood: names are never used again."""
        for group in _by_leader(self._jobs(), labels.fleet):
            if _labels(group[0]).instance == labels.instance:
                return self._observe(group)
        home = self._work.home(labels.fleet, labels.instance)
        record = home.read()
        return None if record is None else self._remember(home, record)

    def _record_of(self, handle: str) -> JobRecord | None:
        for job in self._jobs():
            if str(job.leader) == handle:
                labels = _labels(job)
                record = self._work.home(labels.fleet, labels.instance).read()
                if record is not None:
                    return record
        records = (home.read() for home in self._work.homes())
        return next((r for r in records if r is not None and str(r.job) == handle), None)

    def _observe(self, jobs: Sequence[SlurmJob]) -> InstanceStatus:
        """Return a job of Slurm's queue as a status, with what its folder adds."""
        first = jobs[0]
        labels = _labels(first)
        home = self._work.home(labels.fleet, labels.instance)
        record = home.read()
        home.unmark(MISSING)
        # Submitted by a controller that ended before it noted the number.
        if record is not None and record.job is None:
            record = record.model_copy(update={"job": first.leader})
            home.write(record)
        status = InstanceStatus(
            str(first.leader),
            labels,
            "starting",
            first.submit_s or 0.0,
            hosts=tuple(dict.fromkeys(host for job in jobs for host in job.hosts)),
            instance=None if record is None else record.instance,
        )
        if all(_has_ended(job) for job in jobs):
            return self._end(status, jobs, home, record)
        if any("PENDING" in job.states or "CONFIGURING" in job.states for job in jobs):
            return self._wait(status, jobs)
        return self._look(status, jobs, home, record)

    def _wait(self, status: InstanceStatus, jobs: Sequence[SlurmJob]) -> InstanceStatus:
        told = [explain_waiting(job.reason) for job in jobs if "PENDING" in job.states]
        told = told or [SlurmVerdict("its nodes are being prepared", None)]
        worst = next((each for each in told if each.kind is not None), told[0])
        comment = jobs[0].comment
        late_s = comment.ready_s if comment is not None else float("inf")
        if worst.kind is None and self._clock() - status.since_s > late_s:
            worst = SlurmVerdict(f"{worst.line} since more than {late_s:g} s", "capacity")
        state: InstanceState = "starting" if worst.kind is None else "failed"
        return replace(status, state=state, reason=worst.line, kind=worst.kind)

    def _look(
        self,
        status: InstanceStatus,
        jobs: Sequence[SlurmJob],
        home: JobHome,
        record: JobRecord | None,
    ) -> InstanceStatus:
        started_s = max((job.start_s or 0.0 for job in jobs), default=0.0)
        ends = [
            job.end_s for job in jobs if job.end_s is not None and job.limit_minutes is not None
        ]
        status = replace(status, since_s=started_s, ends_s=min(ends, default=None))
        stopped_s, draining_s = home.marked_s(STOPPED), home.marked_s(DRAINING)
        if stopped_s is not None:
            return replace(status, state="draining", since_s=stopped_s, reason="is being stopped")
        if draining_s is not None:
            return replace(
                status, state="draining", since_s=draining_s, reason="finishes what runs"
            )
        ending = [job for job in jobs if "COMPLETING" in job.states or _has_ended(job)]
        if ending:
            # Nobody here told it to; it holds its nodes for a moment yet.
            told = self._explain(ending, home, record)
            if told is None or told.kind is None:
                why = "is ending" if told is None else told.line
                return replace(status, state="draining", reason=why)
            return replace(status, state="failed", reason=told.line, kind=told.kind)
        if any("SUSPENDED" in job.states for job in jobs):
            return replace(status, state="failed", reason="is suspended by Slurm", kind="capacity")
        return self._notice(_judge(status, home, record, self._clock()), jobs)

    def _notice(self, status: InstanceStatus, jobs: Sequence[SlurmJob]) -> InstanceStatus:
        """Return a job on a node that somebody drains as one that ends once another may be ready.

        Slurm itself lets it run on; whoever drains a node waits for that.
        """
        leaving = sorted(set(status.hosts) & set(self._leaving))
        comment = jobs[0].comment
        if not leaving or comment is None or status.state not in ("starting", "ready"):
            return status
        ends = [self._leaving[host] + comment.ready_s for host in leaving]
        known = [] if status.ends_s is None else [status.ends_s]
        reason = status.reason or f"node {leaving[0]} is being drained"
        ends_s = min(*ends, *known, math.inf)
        return replace(status, ends_s=ends_s, reason=reason, leave=True)

    def _end(
        self,
        status: InstanceStatus,
        jobs: Sequence[SlurmJob],
        home: JobHome,
        record: JobRecord | None,
    ) -> InstanceStatus:
        """Return how a job ended, and keep that, since Slurm forgets it."""
        told = self._explain(jobs, home, record)
        assert told is not None
        ended_s = max((job.end_s or 0.0 for job in jobs), default=0.0)
        failed = any(_worst(jobs).states & FAILED_STATES)
        end = JobEnd(
            state="failed" if failed else "gone",
            at_s=ended_s,
            reason=told.line,
            kind=told.kind,
        )
        if record is not None:
            home.drop_secrets()
            if record.end is None:
                home.write(record.model_copy(update={"end": end}))
        return _ended(status, end, home)

    def _explain(
        self, jobs: Sequence[SlurmJob], home: JobHome, record: JobRecord | None
    ) -> SlurmVerdict | None:
        """Say why a job ends: the first component that did not end well knows; None where none does."""
        worst = _worst(jobs)
        state = min(worst.states & ENDED_STATES, default=None)
        if state is None:
            return None
        # That it failed is all that Slurm knows; its nodes have written down how.
        if record is not None and state == "FAILED":
            told = _told_by_nodes(home, record.nodes)
            if told is not None:
                return told
        return explain_end(state, worst.reason, worst.exit_code, worst.signal)

    def _remember(self, home: JobHome, record: JobRecord) -> InstanceStatus | None:
        """Return a job that Slurm's queue has forgotten; None for one that never was in it.

        Where nothing says that it ended it counts as it last was for `missing_s`, and nothing of it is
        deleted.
        """
        if record.job is None:
            return None
        status = InstanceStatus(
            str(record.job), record.labels, "starting", record.ordered_s, instance=record.instance
        )
        if record.end is None:
            end = self._ask_accounts(record.job) or self._miss(home, record)
            if end is None:
                return self._last_known(status, home, record)
            record = record.model_copy(update={"end": end})
            home.write(record)
            home.drop_secrets()
        assert record.end is not None
        return _ended(status, record.end, home)

    def _miss(self, home: JobHome, record: JobRecord) -> JobEnd | None:
        """Return the end of a job that the queue lacks: its nodes said so, or it was missed for long."""
        now_s = self._clock()
        told = _told_by_nodes(home, record.nodes)
        if told is not None:
            return JobEnd(state="failed", at_s=now_s, reason=told.line, kind=told.kind)
        home.mark(MISSING, now_s)
        if now_s - (home.marked_s(MISSING) or now_s) < self._settings.missing_s:
            return None
        return JobEnd(
            state="gone", at_s=now_s, reason="ended; Slurm no longer knows how", kind="ended"
        )

    def _last_known(
        self, status: InstanceStatus, home: JobHome, record: JobRecord
    ) -> InstanceStatus:
        """Return a job that the queue lacks as it was last known."""
        missed_s = self._clock() - (home.marked_s(MISSING) or self._clock())
        why = f"Slurm's queue has not listed it for {missed_s:.0f} s"
        for mark in (STOPPED, DRAINING):
            marked_s = home.marked_s(mark)
            if marked_s is not None:
                return replace(status, state="draining", since_s=marked_s, reason=why)
        ready = all("ready" in lines for lines in home.node_states(record.nodes).values())
        return replace(status, state="ready" if ready else "starting", reason=why)

    def _ask_accounts(self, job: int) -> JobEnd | None:
        """Return how a job ended by the accounting, where there is one and it says so."""
        answer = self._run(
            "sacct",
            f"--jobs={job}",
            "--allocations",
            "--noheader",
            "--parsable2",
            "--format=State,ExitCode,Elapsed",
        )
        words = answer.out.strip().splitlines()
        if answer.code != 0 or not words:
            return None
        state, _, rest = words[0].partition("|")
        state = state.split(" ")[0]  # "CANCELLED by 1000"
        code, _, signal = rest.partition("|")[0].partition(":")
        if state not in ENDED_STATES:
            return None
        told = explain_end(
            state,
            "None",
            int(code) if code.isdigit() else None,
            int(signal) if signal.isdigit() else None,
        )
        failed = state in FAILED_STATES
        return JobEnd(
            state="failed" if failed else "gone",
            at_s=self._clock(),
            reason=told.line,
            kind=told.kind,
        )


def _canonical(gpu: str, catalog: Catalog | None) -> str:
    return (catalog if catalog is not None else Catalog.default()).gpu(gpu).name


def _has_ended(job: SlurmJob) -> bool:
    return bool(job.states & ENDED_STATES) and "COMPLETING" not in job.states


def _worst(jobs: Sequence[SlurmJob]) -> SlurmJob:
    return next((job for job in jobs if "COMPLETED" not in job.states), jobs[0])


def _labels(job: SlurmJob) -> Labels:
    assert job.comment is not None  # read_jobs leaves out those without
    return job.comment.labels


def _by_leader(jobs: Iterable[SlurmJob], fleet: str) -> list[tuple[SlurmJob, ...]]:
    groups: dict[int, list[SlurmJob]] = {}
    for job in jobs:
        if _labels(job).fleet == fleet:
            groups.setdefault(job.leader, []).append(job)
    return [tuple(groups[leader]) for leader in sorted(groups)]


def _judge(
    status: InstanceStatus, home: JobHome, record: JobRecord | None, now_s: float
) -> InstanceStatus:
    """Return a running job as ready, starting or failed, by what its nodes wrote."""
    if record is None:
        # Its folder is elsewhere: it runs, and whether it answers is for the fabric to say.
        return replace(status, state="ready", reason="runs; its folder is not here")
    told = _told_by_nodes(home, record.nodes)
    if told is not None:
        return replace(status, state="failed", reason=told.line, kind=told.kind)
    states = home.node_states(record.nodes)
    missing = [node for node in record.nodes if "ready" not in states[node]]
    if not missing:
        return replace(status, state="ready")
    if now_s - status.since_s > record.ready_s:
        line = f"{', '.join(missing)} not ready after {record.ready_s:g} s"
        return replace(status, state="failed", reason=line, kind="settings")
    return replace(status, state="starting", reason=f"runs; {', '.join(missing)} not ready yet")


def _told_by_nodes(home: JobHome, nodes: Sequence[str]) -> SlurmVerdict | None:
    """Return the end of a command that ended first, as its node wrote it down."""
    for node, lines in home.node_states(nodes).items():
        for line in lines:
            word, _, code = line.partition(" ")
            if word != "ended" or not code.isdigit():
                continue
            number = int(code)
            # A shell reports a signal as 128 and its number.
            told = (
                explain_exit(node, number)
                if number < 128
                else explain_exit(node, None, number - 128)
            )
            last = home.last_word(node)
            kind = told.kind
            if kind == "ended" and "ready" not in lines:
                kind = classify_exit(f"ended by signal {number - 128}", last)
            return SlurmVerdict(f"{told.line}: {last}" if last else told.line, kind)
    return None


def _ended(status: InstanceStatus, end: JobEnd, home: JobHome) -> InstanceStatus:
    """Return an ended job; one that was told to end is gone, however it took it."""
    # In this order: what drains may be stopped later.
    told = next((what for what in (STOPPED, DRAINING) if home.marked_s(what) is not None), None)
    if told == STOPPED:
        return replace(status, state="gone", since_s=end.at_s, reason="was stopped")
    # A drain that the time limit cut short did not end as asked.
    if told == DRAINING and end.reason != explain_end("TIMEOUT", "None", None, None).line:
        return replace(status, state="gone", since_s=end.at_s, reason="was drained")
    if home.marked_s(DISMISSED) is not None:
        return replace(status, state="gone", since_s=end.at_s, reason=end.reason, kind=end.kind)
    return replace(status, state=end.state, since_s=end.at_s, reason=end.reason, kind=end.kind)


def _refused(command: str, answer: SlurmAnswer) -> DeployError:
    told = explain_refusal(answer.err)
    return DeployError(f"{command}: {told.line}", kind=told.kind or "settings")
