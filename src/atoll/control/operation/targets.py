"""The targets of a fleet: which there are, how each is set, and which machines of the pool belong to which.

A pool's machines stand in regions. A target has a region of its own name ("local", "slurm", and "cluster" for
Kubernetes) unless its settings give another; a pool with a single region belongs to the only target whatever
it is called. SkyPilot has every place of a cloud ("aws/us-east-2"). The fleet file bounds what is used, the
target says how much of that there is now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.core.files import load_yaml
from atoll.core.frozen import Frozen
from atoll.core.ids import parse_node_type
from atoll.core.paths import state_dir
from atoll.deploy.door import Deployer, DeployError, Standing, StartOrder
from atoll.deploy.kubernetes.settings import KubernetesSettings
from atoll.deploy.slurm.settings import SlurmSettings
from atoll.plan.names import Name
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer, Problem

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.deploy.skypilot_tasks import SkySettings

TargetName = Literal["local", "slurm", "kubernetes", "skypilot"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)


class LocalSettings(Frozen):
    """This machine as a target.

    `pretend` lets processes of this machine stand for the machines of the pool, whatever those are.
    """

    region: Name = "local"
    pretend: bool = False


class SkypilotSettings(Frozen):
    """How machines are rented through SkyPilot; see `atoll.deploy.skypilot_tasks.SkySettings`."""

    setup: tuple[str, ...] = ("pip install 'atoll[serve,fabric]' vllm",)
    image: str | None = None
    idle_minutes: int = Field(default=10, ge=1)
    disk_gb: int = Field(default=256, ge=1)

    def as_sky(self) -> SkySettings:
        """Return them in the words of the target."""
        from atoll.deploy.skypilot_tasks import SkySettings

        return SkySettings(self.setup, self.image, self.idle_minutes, self.disk_gb)


class TargetSettings(Frozen):
    """The targets that a fleet uses, in order, and how each of them is set."""

    names: tuple[TargetName, ...] = ("local",)
    local: LocalSettings = LocalSettings()
    slurm: SlurmSettings | None = None
    kubernetes: KubernetesSettings = KubernetesSettings()
    skypilot: SkypilotSettings = SkypilotSettings()

    @property
    def pretends(self) -> bool:
        """Whether processes of this machine stand for others."""
        return "local" in self.names and self.local.pretend


def read_names(text: str) -> tuple[TargetName, ...]:
    """Read "slurm,kubernetes"."""
    names: list[TargetName] = []
    for word in (part.strip() for part in text.split(",")):
        found = next((name for name in TARGETS if name == word), None)
        if found is None:
            raise UnknownNameError("target", word, TARGETS, field="--on")
        if found in names:
            raise UsageError(f"{word} is named twice", field="--on", hint="name each target once")
        names.append(found)
    return tuple(names)


def read_settings(
    names: Sequence[TargetName],
    problem: Problem,
    *,
    path: Path | None = None,
    given: Mapping[str, Mapping[str, object]] | None = None,
    known: TargetSettings | None = None,
) -> TargetSettings:
    """Return the settings of targets: a file's, over which `given` (of the command line) wins.

    What neither says is as in `known`, the settings of before. Where a pool has a single region and there is
    a single target that can be told its region, the region is that one's. Slurm's work folder is in the state
    folder where nobody names one, and its nodes run the Python that this process runs.
    """
    told: dict[str, dict[str, object]] = {name: {} for name in TARGETS}
    for name, section in (_read_file(path) if path is not None else {}).items():
        told[name] |= section
    for name, options in (given or {}).items():
        told[name] |= options
    sections = {name: _dump(known, name) | told[name] for name in TARGETS}
    regions = sorted({offer.region for offer in problem.offers})
    if len(names) == 1 and len(regions) == 1 and names[0] != "skypilot":
        sections[names[0]]["region"] = told[names[0]].get("region", regions[0])
    if "slurm" in names:
        # Homes are seen by all nodes of most clusters: so are the folder and the installation in them.
        sections["slurm"].setdefault("work_folder", str(state_dir() / "slurm"))
        sections["slurm"].setdefault("python", sys.executable)
        sections["slurm"].setdefault("atoll", (sys.executable, "-m", "atoll"))
    data: dict[str, object] = {n: section for n, section in sections.items() if section}
    return TargetSettings.parse({"names": tuple(names), **data}, path=path)


def _dump(known: TargetSettings | None, name: TargetName) -> dict[str, object]:
    section = None if known is None else getattr(known, name)
    return {} if section is None else dict(section.model_dump(exclude_defaults=True))


def _read_file(path: Path) -> dict[str, dict[str, object]]:
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise InputError("a mapping of targets is needed", path=path, hint="write slurm: {...}")
    sections: dict[str, dict[str, object]] = {}
    for name, section in data.items():
        if name not in TARGETS:
            raise InputError(
                f"unknown target {name!r}", path=path, hint=f"known: {', '.join(TARGETS)}"
            )
        if not isinstance(section, dict):
            raise InputError("a mapping of settings is needed", path=path, field=str(name))
        sections[name] = {str(key).replace("-", "_"): value for key, value in section.items()}
    return sections


def own_regions(
    name: TargetName, settings: TargetSettings, pool: Iterable[Offer]
) -> frozenset[str]:
    """Return the regions of a pool that are a target's by name."""
    regions = {offer.region for offer in pool}
    if len(settings.names) == 1:
        return frozenset(regions)
    named = {
        "local": {settings.local.region},
        "slurm": {settings.slurm.region} if settings.slurm is not None else set(),
        "kubernetes": {settings.kubernetes.region, *settings.kubernetes.regions.values()},
    }
    taken = set[str]().union(*(named[other] for other in settings.names if other in named))
    if name == "skypilot":
        return frozenset(region for region in regions - taken if "/" in region)
    if name == "local" and settings.local.pretend:
        # What no other target has is played here.
        others = taken - named["local"]
        clouds = {r for r in regions if "/" in r} if "skypilot" in settings.names else set()
        return frozenset(regions - others - clouds)
    return frozenset(regions & named[name])


class TargetMap:
    """Where an instance stands: on the target that has the regions of its nodes."""

    def __init__(self, settings: TargetSettings, pool: Sequence[Offer]) -> None:
        self._names = settings.names
        self._owner = {
            region: name for name in settings.names for region in own_regions(name, settings, pool)
        }

    def of_region(self, region: str) -> TargetName | None:
        """Return the target of a region, None if it is nobody's."""
        return self._names[0] if len(self._names) == 1 else self._owner.get(region)

    def of_instance(self, instance: Instance) -> TargetName:
        """Return the target of an instance; DeployError where no single target has its regions."""
        if len(self._names) == 1:
            return self._names[0]
        regions = sorted({instance.region_of(node) for node in instance.nodes})
        found = {self._owner.get(region) for region in regions}
        (name,) = found if len(found) == 1 else (None,)
        if name is None:
            raise DeployError(
                f"{instance.id} stands in {', '.join(regions)}, which is no single target's",
                kind="settings",
                hint="set the region of a target in --target-file",
            )
        return name

    def list_unclaimed(self, pool: Iterable[Offer]) -> tuple[str, ...]:
        """Return the regions of a pool that belong to no target."""
        return tuple(sorted({o.region for o in pool if self.of_region(o.region) is None}))


def bound_offers(pool: Iterable[Offer], there: Iterable[Offer]) -> tuple[Offer, ...]:
    """Return what a pool allows of what is there: the pool's names and prices, no more than there is.

    Machines of one's own may play any market, and a cluster's may be called owned. A large machine is as many
    small ones as it holds; where a pool names both sizes, the target has the last word. A price of 0 in the
    pool is the target's.
    """
    found = tuple(there)
    bounded = []
    for offer in pool:
        count, prices = 0, []
        gpu, gpus = parse_node_type(offer.node_type)
        for machine in found:
            has, size = parse_node_type(machine.node_type)
            if (
                machine.region == offer.region
                and has == gpu
                and size >= gpus
                and _fits(offer, machine)
            ):
                count += machine.available * (size // gpus)
                prices.append(machine.usd_per_hour * gpus / size)
        usd = offer.usd_per_hour or max(prices, default=0.0)
        bounded.append(
            offer.model_copy(update={"available": min(offer.available, count), "usd_per_hour": usd})
        )
    return tuple(bounded)


def _fits(offer: Offer, machine: Offer) -> bool:
    if machine.market in ("owned", offer.market):
        return True
    return offer.market == "owned" and machine.market == "on-demand"


class PoolTarget:
    """A target of which only what a fleet's pool names is on offer."""

    def __init__(self, target: Deployer, pool: Sequence[Offer]) -> None:
        self.name = target.name
        self.target = target
        self._pool = tuple(pool)

    def offers(self) -> Sequence[Offer]:
        """Return how much of the pool there is now."""
        return bound_offers(self._pool, self.target.offers())

    def list(self, fleet: str) -> Sequence[Standing]:
        """Return what stands there of a fleet."""
        return self.target.list(fleet)

    def start(self, order: StartOrder) -> Standing:
        """Bring an instance up."""
        return self.target.start(order)

    def drain(self, handle: str, term: int) -> None:
        """Have an instance end when its streams have."""
        self.target.drain(handle, term)

    def stop(self, handle: str, term: int) -> None:
        """End an instance now."""
        self.target.stop(handle, term)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of an instance."""
        return self.target.logs(handle, lines)


def open_targets(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    *,
    catalog: Catalog | None = None,
    drain_s: float = 600.0,
) -> dict[str, PoolTarget]:
    """Return a fleet's targets by name; DeployError says which cannot be reached, and why.

    `folder` is where the local target keeps what pretends to be machines; real GPUs are kept account of in
    one folder for all fleets of this user.
    """
    opened: dict[str, PoolTarget] = {}
    for name in settings.names:
        regions = own_regions(name, settings, pool)
        own = tuple(offer for offer in pool if offer.region in regions)
        opened[name] = PoolTarget(_OPEN[name](settings, own, folder, catalog, drain_s), own)
    return opened


def _open_local(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    catalog: Catalog | None,
    drain_s: float,
) -> Deployer:
    from atoll.deploy.local import LocalDeployer
    from atoll.deploy.local_slots import find_machines, pretend_machines

    del catalog
    if settings.local.pretend:
        return LocalDeployer(pretend_machines(pool), folder / "local", drain_s=drain_s)
    machines = find_machines(settings.local.region)
    return LocalDeployer(machines, state_dir() / "local", drain_s=drain_s)


def _open_slurm(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    catalog: Catalog | None,
    drain_s: float,
) -> Deployer:
    from atoll.deploy.slurm.target import SlurmDeployer

    del pool, folder, drain_s
    assert settings.slurm is not None
    return SlurmDeployer(settings.slurm, catalog=catalog)


def _open_kubernetes(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    catalog: Catalog | None,
    drain_s: float,
) -> Deployer:
    from atoll.deploy.kubernetes.deployer import KubernetesDeployer

    del pool, folder, drain_s
    return KubernetesDeployer.connect(settings.kubernetes, catalog)


def _open_skypilot(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    catalog: Catalog | None,
    drain_s: float,
) -> Deployer:
    from atoll.deploy.skypilot import SkyDeployer

    del folder, catalog, drain_s
    rented = [offer for offer in pool if offer.market != "owned"]
    return SkyDeployer(rented, settings.skypilot.as_sky())


_OPEN: Mapping[
    TargetName,
    Callable[[TargetSettings, Sequence[Offer], Path, Catalog | None, float], Deployer],
] = {
    "local": _open_local,
    "slurm": _open_slurm,
    "kubernetes": _open_kubernetes,
    "skypilot": _open_skypilot,
}
