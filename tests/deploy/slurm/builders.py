"""Orders to be started, and a stand-in for Slurm's commands with the outputs of a real one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.slurm.runner import SlurmAnswer
from atoll.deploy.target import StartOrder
from atoll.plan.plan import Instance, Node

DATA = Path(__file__).parent / "data"
NOW_S = 1_794_796_330.0
"""When squeue-22.05.json was written."""


def read_data(name: str) -> str:
    return (DATA / name).read_text("utf-8")


def make_order(
    instance: str = "a",
    kinds: Sequence[str] = ("L4:1",),
    argv: Sequence[str] = ("sleep", "600"),
    *,
    fleet: str = "f",
    term: int = 1,
    env: Sequence[tuple[str, str]] = (),
    secrets: Sequence[tuple[str, str]] = (),
    nodes: Sequence[Node] | None = None,
    ready_s: float = 600.0,
) -> StartOrder:
    """Return an order of one command on every node; `nodes` where slots or hosts matter."""
    nodes = nodes or [
        Node(id=f"n{i}", node_type=kind, market="on-demand", start=i, end=i + 1, tp=1)
        for i, kind in enumerate(kinds)
    ]
    placed = Instance(
        id=instance,
        service="chat",
        role="qwen3-32b/llm/both",
        region="slurm",
        stages=len(nodes),
        nodes=tuple(nodes),
        flows=(),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )
    labels = Labels(
        fleet=fleet,
        instance=instance,
        plan="p1",
        placement="l1",
        service="chat",
        role="qwen3-32b/llm/both",
        term=term,
    )
    commands = tuple(
        NodeCommand(n.id, n.node_type, tuple(argv), n.gpus, tuple(env), tuple(secrets))
        for n in nodes
    )
    return StartOrder(placed, labels, commands, ready_s)


class FakeSlurm:
    """Answers Slurm's commands from a list of jobs; what was asked is in `asked`.

    `refusal` is what sbatch prints instead of taking a job, and `loses_answer` has it take one and not end.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.asked: list[tuple[str, ...]] = []
        self.refusal = ""
        self.loses_answer = False
        self.ending: list[int] = []
        self.errors: list[dict[str, object]] = []
        self.accounts = SlurmAnswer(1, "", "Slurm accounting storage is disabled")
        self.nodes = read_data("sinfo-22.05.json")
        self.partitions = read_data("partitions.txt")
        self._next = 100

    def run(self, argv: Sequence[str], *, deadline_s: float) -> SlurmAnswer:
        self.asked.append(tuple(argv))
        answer: SlurmAnswer = getattr(self, f"_{argv[0]}")(argv)
        return answer

    def calls(self, command: str) -> list[tuple[str, ...]]:
        return [argv for argv in self.asked if argv[0] == command]

    def set_state(self, job: str, **fields: object) -> None:
        for row in self.rows:
            if job in (str(row["job_id"]), str(row["het_job_id"])):
                row.update(fields)

    def forget(self) -> None:
        self.rows.clear()

    def _squeue(self, argv: Sequence[str]) -> SlurmAnswer:
        if "--json" not in argv:
            return SlurmAnswer(0, "".join(f"{job}\n" for job in self.ending), "")
        if self.errors:
            return SlurmAnswer(0, json.dumps({"errors": self.errors, "jobs": []}), "")
        return SlurmAnswer(0, json.dumps({"jobs": self.rows}), "")

    def _sinfo(self, argv: Sequence[str]) -> SlurmAnswer:
        return SlurmAnswer(0, self.nodes, "")

    def _scontrol(self, argv: Sequence[str]) -> SlurmAnswer:
        return SlurmAnswer(0, self.partitions, "")

    def _sacct(self, argv: Sequence[str]) -> SlurmAnswer:
        return self.accounts

    def _scancel(self, argv: Sequence[str]) -> SlurmAnswer:
        if not any(word.startswith("--signal") for word in argv):
            self.set_state(argv[-1], job_state="CANCELLED", end_time=NOW_S)
        return SlurmAnswer(0, "", "")

    def _sbatch(self, argv: Sequence[str]) -> SlurmAnswer:
        if self.refusal:
            return SlurmAnswer(1, "", self.refusal)
        script = Path(argv[-1]).read_text("utf-8")
        comments = re.findall(r"^#SBATCH --comment='(.*)'$", script, re.MULTILINE)
        leader = self._next
        for offset, comment in enumerate(comments):
            self.rows.append(
                {
                    "job_id": self._next,
                    "het_job_id": leader if len(comments) > 1 else 0,
                    "het_job_offset": offset,
                    "comment": comment.replace("\\\\", "\\"),
                    "job_state": "PENDING",
                    "state_reason": "Resources",
                    "submit_time": int(NOW_S),
                    "nodes": "",
                }
            )
            self._next += 1
        if self.loses_answer:
            return SlurmAnswer(-9, "", "", timed_out=True)
        return SlurmAnswer(0, f"{leader}\n", "")
