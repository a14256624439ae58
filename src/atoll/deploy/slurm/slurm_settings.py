"""Settings of a Slurm cluster as a target: where jobs may run, for how long, and what they need first."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from atoll.deploy.target import DeployerSettings
from atoll.plan.name_types import Name
from atoll.plan.plan import NotNegative

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.:&|*()\[\]!+-]+")
_OPTION = re.compile(r"--([a-z][a-z-]*)(?:=([A-Za-z0-9_.,:@=+\[\]/-]+))?")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")

ALLOWED_OPTIONS = (
    "cpus-per-gpu",
    "cpus-per-task",
    "exclude",
    "exclusive",
    "gpu-bind",
    "gres-flags",
    "hint",
    "licenses",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "nice",
    "reservation",
    "switches",
    "tmp",
    "wckey",
)
"""Further options of sbatch that change nothing Atoll relies on."""


def _fits(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) > 200 or pattern.fullmatch(text) is None:
            raise ValueError(f"not {what}")
        return text

    return AfterValidator(check)


def _allowed(text: str) -> str:
    match = _OPTION.fullmatch(text)
    if match is None or match[1] not in ALLOWED_OPTIONS:
        raise ValueError(f"write --NAME=VALUE with one of {', '.join(ALLOWED_OPTIONS)}")
    return text


def _plain_folder(text: str) -> str:
    # Slurm reads % and quotes in the names of output files in its own way.
    if not PurePosixPath(text).is_absolute() or not text.isprintable() or set(text) & set("'\"\\%"):
        raise ValueError("write an absolute path without quotes, backslashes and %")
    return text


Word = Annotated[str, _fits(_WORD, "a name that Slurm knows")]
ModuleName = Annotated[str, _fits(_MODULE, "the name of a module")]


class SlurmSettings(DeployerSettings):
    """How jobs are asked for on one cluster.

    Without `partitions` every partition that is up is used; jobs in `spot_partitions` may be preempted, and
    their nodes are offered as spot. `time_limit_minutes` is the wall time to ask for, the partition's own
    otherwise; `notice_s` before it ends nodes are told (SIGUSR1). `cpus_per_gpu` are asked for, or as many as
    nodes have for each of their GPUs where that is less; 0 leaves it to the cluster, and so do options of
    sbatch that say it. `options` are further ones of sbatch.
    `work_folder` must be seen by this machine and the compute nodes under the same path: scripts, logs and
    secrets stand there. `python` runs on compute nodes, `atoll` is what stands for the command `atoll` there,
    and `modules` are loaded first. `compile_cache` is a folder of compute nodes, shared or each one's own,
    for what engines compile as they start; left out, they keep it in your home. `gpu_names` gives the
    catalog's GPU for a gres type that is not called the same ({"a100": "A100-40"}; "gpu" is for gres without
    a type). `usd_per_gpu_hour` is by catalog name and 0 where it is not given. `deadline_s` ends any call of
    Slurm's commands; ended jobs are listed for `keep_s`. One that the queue does not list, while
    nobody says that it ended, counts as gone after `missing_s`.
    """

    region: Name = "slurm"
    partitions: tuple[Word, ...] = ()
    spot_partitions: tuple[Word, ...] = ()
    account: Word | None = None
    qos: Word | None = None
    constraint: Annotated[str, _fits(_CONSTRAINT, "a constraint of sbatch")] | None = None
    time_limit_minutes: int | None = Field(default=None, ge=1, lt=525_600)
    notice_s: int = Field(default=120, ge=0, le=65_535)
    cpus_per_gpu: int = Field(default=8, ge=0)
    options: tuple[Annotated[str, AfterValidator(_allowed)], ...] = ()
    work_folder: Annotated[str, AfterValidator(_plain_folder)]
    python: str = Field(default="python3", min_length=1)
    atoll: tuple[str, ...] = Field(default=("atoll",), min_length=1)
    modules: tuple[ModuleName, ...] = ()
    compile_cache: Annotated[str, AfterValidator(_plain_folder)] | None = None
    gpu_names: dict[str, str] = Field(default_factory=dict)
    usd_per_gpu_hour: dict[str, NotNegative] = Field(default_factory=dict)
    deadline_s: float = Field(default=30.0, gt=0)
    keep_s: float = Field(default=3600.0, ge=0)
    missing_s: float = Field(default=60.0, ge=0)

    @model_validator(mode="after")
    def _spot_is_used(self) -> Self:
        left_out = sorted(set(self.spot_partitions) - set(self.partitions))
        if self.partitions and left_out:
            raise ValueError(f"spot_partitions are not among partitions: {', '.join(left_out)}")
        return self
