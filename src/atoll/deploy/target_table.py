"""The table of targets: a field of `TargetSettings` is a target, and its settings open its deployer.

A new target is a module or folder with a deployer (`atoll.deploy.target.Deployer`), its settings (a
`DeployerSettings` with `open` and `claim`), and one field here. `--on NAME` and a section NAME in
`--target-file` then work; nothing else lists targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from pydantic import field_validator

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.core.files import load_yaml
from atoll.core.frozen import Frozen
from atoll.deploy.joined.joined_settings import JoinedSettings
from atoll.deploy.kubernetes.kube_target import KubernetesTarget
from atoll.deploy.local.local_settings import LocalSettings
from atoll.deploy.ray.ray_target import RayTarget
from atoll.deploy.skypilot import SkypilotSettings
from atoll.deploy.slurm.slurm_target import SlurmTarget
from atoll.deploy.target import DeployerSettings
from atoll.plan.problem import Problem


class TargetSettings(Frozen):
    """The targets that a fleet uses, in order (`names`), and how each of them is set."""

    names: tuple[str, ...] = ("local",)
    local: LocalSettings = LocalSettings()
    slurm: SlurmTarget | None = None
    kubernetes: KubernetesTarget = KubernetesTarget()
    ray: RayTarget = RayTarget()
    skypilot: SkypilotSettings = SkypilotSettings()
    joined: JoinedSettings = JoinedSettings()

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse names that are no target, as in a record that somebody edited."""
        for name in names:
            if name not in cls.targets():
                raise ValueError(f"no target is called {name!r}; use {', '.join(cls.targets())}")
        return names

    @property
    def pretends(self) -> bool:
        """Whether processes of this machine stand for others."""
        return any(self.section(name).pretends for name in self.names)

    def section(self, name: str) -> DeployerSettings:
        """Return the settings of a target; one that must be set and is not claims and opens nothing."""
        found = getattr(self, name)
        return found if isinstance(found, DeployerSettings) else DeployerSettings()

    @classmethod
    def targets(cls) -> dict[str, type[DeployerSettings]]:
        """Return the class of settings of every target there is, by its name."""
        kinds = {}
        for name, field in cls.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, DeployerSettings):
                    kinds[name] = kind
        return kinds


TARGETS = tuple(TargetSettings.targets())


def read_names(text: str, table: type[TargetSettings] = TargetSettings) -> tuple[str, ...]:
    """Read "slurm,kubernetes"."""
    names: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word not in table.targets():
            raise UnknownNameError("target", word, table.targets(), field="--on")
        if word in names:
            raise UsageError(f"{word} is named twice", field="--on", hint="name each target once")
        names.append(word)
    return tuple(names)


def read_settings(
    names: Sequence[str],
    problem: Problem,
    *,
    path: Path | None = None,
    given: Mapping[str, Mapping[str, object]] | None = None,
    known: TargetSettings | None = None,
    table: type[TargetSettings] = TargetSettings,
) -> TargetSettings:
    """Return the settings of targets: a file's, over which `given` (of the command line) wins.

    What neither says is as in `known`, the settings of before, else as the target fills it in. Where a pool
    has a single region and there is a single target that can be told its region, the region is that one's.
    """
    kinds = table.targets()
    told: dict[str, dict[str, object]] = {name: {} for name in kinds}
    for source in (read_target_file(path, tuple(kinds)) if path is not None else {}, given or {}):
        for name, section in source.items():
            told[name] |= section
    sections = {name: _dump(known, name) | told[name] for name in kinds}
    regions = sorted({offer.region for offer in problem.offers})
    if len(names) == 1 and len(regions) == 1 and "region" in kinds[names[0]].model_fields:
        sections[names[0]]["region"] = told[names[0]].get("region", regions[0])
    for name in names:
        sections[name] = {**kinds[name].defaults(), **sections[name]}
    data = {name: section for name, section in sections.items() if section}
    return table.parse({"names": tuple(names), **data}, path=path)


def _dump(known: TargetSettings | None, name: str) -> dict[str, object]:
    section = None if known is None else getattr(known, name)
    return {} if section is None else dict(section.model_dump(exclude_defaults=True))


def read_target_file(path: Path, names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the settings in a file by target; InputError for one that is not among `names`."""
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise InputError("a mapping of targets is needed", path=path, hint="write slurm: {...}")
    sections: dict[str, dict[str, object]] = {}
    for name, section in data.items():
        if name not in names:
            raise InputError(
                f"unknown target {name!r}", path=path, hint=f"known: {', '.join(names)}"
            )
        if not isinstance(section, dict):
            raise InputError("a mapping of settings is needed", path=path, field=str(name))
        sections[name] = {str(key).replace("-", "_"): value for key, value in section.items()}
    return sections
