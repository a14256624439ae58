"""Nodes of a cluster with their GPUs and partitions, and which of them are free now.

A node is offered with the GPUs that others leave: those that Atoll's own jobs hold count as free, since a
planner counts what it uses itself. A node that is used in part is offered as a smaller one, rounded down to a
power of two.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.core.ids import format_node_type
from atoll.deploy.slurm.slurm_jobs import SlurmJob, read_number, read_rows, read_words
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import DeployError
from atoll.plan.plan import Market
from atoll.plan.problem import Offer

_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::(?P<type>[^:,()=]+?))?(?:[:=](?P<count>\d+))?(?:\([^()]*\))?"
)
_WALL_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,4}):(\d\d):\d\d")
_SPLIT = re.compile(r",(?![^()]*\))")
_AWAY = re.compile(
    r"DOWN|DRAIN|DRAINED|DRAINING|FAIL|FAILING|MAINT|MAINTENANCE|RESERVED|UNKNOWN|ERROR|FUTURE|INVALID"
    r"|NOT_RESPONDING|INVALID_REG|POWERING_DOWN|REBOOT_REQUESTED|REBOOT_ISSUED"
)
"""States and flags of a node on which nothing can be started."""
_LEAVING = re.compile(r"DRAIN|DRAINING|REBOOT_REQUESTED|POWERING_DOWN")
"""Those of a node that is to be empty; what runs there runs on until somebody ends it."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node: its partitions, its GPUs by gres type ("" without one), and how many of each are taken.

    `leaving_s` is since when somebody wants it empty, Unix time, 0 where Slurm does not say; None if nobody.
    `cpus` is 0 where Slurm does not say.
    """

    name: str
    partitions: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]
    used: tuple[tuple[str, int], ...]
    is_up: bool
    leaving_s: float | None = None
    cpus: int = 0


@dataclass(frozen=True, slots=True)
class SlurmPartition:
    """A partition: whether it takes jobs, its wall time in minutes (None: no limit), and who may use it.

    `accounts` and `qos` are those it allows, or does not where they are `denied`; None allows all.
    """

    name: str
    is_up: bool
    limit_minutes: int | None
    accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()

    def refuses(self, settings: SlurmSettings) -> str | None:
        """Return why jobs with these settings may not run here; None where they may, as far as is known."""
        account, qos, asked = settings.account, settings.qos, settings.time_limit_minutes
        if account is not None and not _allows(account, self.accounts, self.denied_accounts):
            return f"partition {self.name} does not allow the account {account}"
        if qos is not None and not _allows(qos, self.qos, self.denied_qos):
            return f"partition {self.name} does not allow the qos {qos}"
        if asked is not None and self.limit_minutes is not None and asked > self.limit_minutes:
            return f"partition {self.name} allows {self.limit_minutes} minutes and {asked} are asked for"
        return None


def _allows(name: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> bool:
    # Slurm keeps the names of accounts and qos in small letters.
    folded = name.lower()
    return folded not in denied and (allowed is None or folded in allowed)


def has_nodes(text: str) -> bool:
    """Return whether the JSON of `sinfo` is that of 22.05; from 23.02 on it tells of groups of nodes."""
    try:
        return '"nodes"' in text and "nodes" in json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return True  # whoever reads it says what is wrong with it


def read_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Return the nodes in the JSON of `sinfo` (22.05) or `scontrol show nodes` (later), by name."""
    rows = read_rows(text, "nodes", "sinfo")
    return tuple(sorted((_node(row) for row in rows), key=lambda node: node.name))


def _node(row: Mapping[str, object]) -> SlurmNode:
    partitions = row.get("partitions")
    states = read_words(row.get("state")) | read_words(row.get("state_flags"))
    cpus, taken = read_number(row.get("cpus")) or 0, read_number(row.get("alloc_cpus")) or 0
    gpus = read_gres(str(row.get("gres") or ""))
    used = read_gres(str(row.get("gres_used") or ""))
    if cpus and taken >= cpus and not used:
        used = gpus  # no CPU is left to run anything on
    return SlurmNode(
        name=str(row.get("name") or ""),
        partitions=tuple(str(each) for each in partitions) if isinstance(partitions, list) else (),
        gpus=tuple(sorted(gpus.items())),
        used=tuple(sorted(used.items())),
        is_up=not any(map(_AWAY.fullmatch, states)),
        leaving_s=float(read_number(row.get("reason_changed_at")) or 0)
        if any(map(_LEAVING.fullmatch, states))
        else None,
        cpus=cpus,
    )


def read_gres(text: str) -> Counter[str]:
    """Return GPUs by type: "gpu:l4:2(S:0-1),gpu:t4:1(IDX:0)" is 2 of l4 and 1 of t4; "gpu:4" has no type."""
    counts: Counter[str] = Counter()
    for part in _SPLIT.split(text):
        match = _GRES.fullmatch(part.strip())
        if match is None:
            continue
        kind, count = match["type"] or "", match["count"]
        if count is None and kind.isdigit():
            kind, count = "", kind
        counts[kind] += int(count or 1)
    return +counts


def read_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Return the partitions in the lines of `scontrol show partition --oneliner`, by name."""
    found = {}
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        if name := fields.get("PartitionName"):
            found[name] = SlurmPartition(
                name,
                is_up=fields.get("State") == "UP",
                limit_minutes=read_minutes(fields.get("MaxTime", "")),
                accounts=_read_names(fields.get("AllowAccounts", "ALL")),
                denied_accounts=_read_names(fields.get("DenyAccounts", "")) or (),
                qos=_read_names(fields.get("AllowQos", "ALL")),
                denied_qos=_read_names(fields.get("DenyQos", "")) or (),
            )
    return tuple(found[name] for name in sorted(found))


def _read_names(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" else tuple(sorted(n for n in text.lower().split(",") if n))


def read_minutes(text: str) -> int | None:
    """Return a wall time "[days-]hours:minutes:seconds" in whole minutes; None for "UNLIMITED"."""
    match = _WALL_TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes = (int(match[i] or 0) for i in (1, 2, 3))
    return (days * 24 + hours) * 60 + minutes


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """How a GPU of the catalog is asked for: its gres ("gpu:l4"), and the partitions to try.

    `cpus` are those of one node's command, 0 where nothing is said of them.
    """

    gres: str
    partitions: tuple[str, ...]
    cpus: int = 0


class SlurmPool:
    """A cluster's nodes as settings let them be used, in the words of the catalog.

    `notes` has a line for every kind of GPU that the catalog does not know.
    """

    def __init__(
        self,
        settings: SlurmSettings,
        nodes: Sequence[SlurmNode],
        partitions: Sequence[SlurmPartition],
        catalog: Catalog | None = None,
    ) -> None:
        self._settings = settings
        self._catalog = catalog if catalog is not None else Catalog.default()
        known = {partition.name: partition for partition in partitions}
        for name in (*settings.partitions, *settings.spot_partitions):
            if name not in known:
                raise DeployError(str(UnknownNameError("partition", name, known)), kind="settings")
        wanted = settings.partitions or tuple(known)
        self._partitions = {name: known[name] for name in wanted if known[name].is_up}
        self._nodes = nodes
        types = sorted({kind for node in nodes if self._markets(node) for kind, _ in node.gpus})
        self._names: dict[str, str] = {}
        unknown: list[str] = []
        several: list[str] = []
        for kind in types:
            sizes = self._list_sizes(kind)
            if len(sizes) > 1:
                several.append(f"gpu:{kind} ({' or '.join(sizes)})")
                continue
            gpu = self._find_gpu(kind)
            if gpu is None:
                unknown.append(f"gpu:{kind}" if kind else "gpu without a type")
            else:
                self._names[kind] = gpu
        whys = (("the catalog has no such GPU", unknown), ("several are called so", several))
        self.notes: tuple[str, ...] = tuple(
            f"not offered, since {why}: {', '.join(found)}; set gpu_names"
            for why, found in whys
            if found
        )

    def _list_sizes(self, kind: str) -> list[str]:
        """Return the GPUs that a gres type may be that names a family alone: an "a100" has 40 GB or 80."""
        if kind in self._settings.gpu_names or not kind:
            return []
        gpus = self._catalog.gpus
        if any(name.casefold() == kind.casefold() for name in gpus):
            return []
        return sorted(name for name in gpus if name.casefold().startswith(f"{kind.casefold()}-"))

    def _find_gpu(self, kind: str) -> str | None:
        try:
            return self._catalog.gpu(self._settings.gpu_names.get(kind or "gpu", kind)).name
        except UnknownNameError:
            return None

    def _markets(self, node: SlurmNode) -> tuple[Market, ...]:
        """The markets of a node's partitions; one that is in both is on demand."""
        usable = [name for name in node.partitions if name in self._partitions]
        if not usable:
            return ()
        spot = set(self._settings.spot_partitions)
        return ("spot",) if spot.issuperset(usable) else ("on-demand",)

    def list_offers(self, own: Iterable[SlurmJob] = ()) -> tuple[Offer, ...]:
        """Return what can be had now, with what Atoll's own jobs hold."""
        held = count_held(own)
        counts: Counter[tuple[str, Market]] = Counter()
        for node in self._nodes:
            ours = held.get(node.name, Counter())
            if not node.is_up:
                continue
            for kind, total in node.gpus:
                if kind not in self._names:
                    continue
                free = min(total, max(0, total - dict(node.used).get(kind, 0)) + ours[kind])
                size = total if free == total else _largest_power(free)
                for market in self._markets(node) if size else ():
                    counts[format_node_type(self._names[kind], size), market] += 1
        return tuple(
            Offer(
                region=self._settings.region,
                node_type=node_type,
                market=market,
                available=count,
                usd_per_hour=self._price(node_type),
            )
            for (node_type, market), count in sorted(counts.items())
        )

    def _price(self, node_type: str) -> float:
        gpu, _, count = node_type.rpartition(":")
        return self._settings.usd_per_gpu_hour.get(gpu, 0.0) * int(count)

    def choose(
        self,
        gpu: str | None,
        gpus: int,
        market: Market,
        nodes: int,
        avoided: frozenset[str] = frozenset(),
    ) -> GpuChoice:
        """Return how to ask for nodes with so many GPUs; DeployError where there can be none.

        Where several gres types are the same GPU, the one that most nodes have is asked for. Partitions that
        do not allow the wall time asked for are left out.
        """
        fits = Counter[str]()
        places: dict[str, Counter[str]] = {}
        for node in self._nodes:
            if not node.is_up or market not in ("owned", *self._markets(node)):
                continue
            if node.name in avoided:
                continue
            for kind, total in node.gpus if gpu is not None else (("", 0),):
                if total >= gpus and (gpu is None or self._names.get(kind) == gpu):
                    fits[kind] += 1
                    places.setdefault(kind, Counter()).update(
                        p for p in node.partitions if p in self._partitions
                    )
        what = f"{gpus} {gpu}" if gpu is not None else "no GPU"
        kind, count = max(fits.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        if count < nodes:
            aside = f" and not set aside ({', '.join(sorted(avoided))})" if avoided else ""
            raise DeployError(
                f"{count} nodes with {what} are up ({market}){aside}, and {nodes} are needed",
                kind="capacity",
            )
        fitting = sorted(name for name, there in places[kind].items() if there >= nodes)
        if not fitting:
            raise DeployError(f"no partition has {nodes} nodes with {what}", kind="capacity")
        refusals = {name: self._partitions[name].refuses(self._settings) for name in fitting}
        allowed = tuple(name for name in fitting if refusals[name] is None)
        if not allowed:
            raise DeployError(
                str(refusals[fitting[0]]),
                kind="settings",
                hint="change the target's settings, or name another partition",
            )
        if gpu is None:
            return GpuChoice("", allowed)
        return GpuChoice(f"gpu:{kind}" if kind else "gpu", allowed, self._count_cpus(kind, gpus))

    def _count_cpus(self, kind: str, gpus: int) -> int:
        """Return how many CPUs to ask for beside GPUs: no more than are theirs on any node with such."""
        theirs = [
            node.cpus // total
            for node in self._nodes
            for each, total in node.gpus
            if each == kind and total >= gpus and node.cpus
        ]
        return gpus * min(self._settings.cpus_per_gpu, min(theirs, default=0))

    @property
    def hosts(self) -> frozenset[str]:
        """The names of all nodes."""
        return frozenset(node.name for node in self._nodes)


def count_held(jobs: Iterable[SlurmJob]) -> dict[str, Counter[str]]:
    """Return how many GPUs of each type jobs hold on each host."""
    held: dict[str, Counter[str]] = {}
    for job in jobs:
        for host, gres in zip(job.hosts, job.gres, strict=False):
            held.setdefault(host, Counter()).update(read_gres(gres))
    return held


def _largest_power(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0
