"""Edits of a fleet file: services that come, change or go, machines of one's own, models of one's own.

An edit speaks the words of the fleet file: what it says of a service are keys of that file, with their units.
The file is changed as text (`yaml_text`), and whoever reads it then says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import parse_yaml
from atoll.core.frozen import Frozen
from atoll.core.units import pluralize
from atoll.planner.yaml_text import rewrite

MAX_NAMES = 1000
MAX_LETTERS = 1_000_000
"""Of a fleet file that somebody sends."""
Name = Annotated[str, Field(min_length=1, max_length=120)]
Entry = dict[str, JsonValue]


class AddedMachines(Frozen):
    """Machines of one's own that come, or go where the number is negative.

    `names` are those of machines of a cluster whose machines have names.
    """

    region: Name
    node_type: Name
    count: Annotated[int, Field(strict=True, ge=-10_000, le=10_000)] = 1
    names: Annotated[tuple[Name, ...], Field(max_length=MAX_NAMES)] = ()


class FleetEdit(Frozen):
    """What is to be another in a fleet file.

    A service is given by the keys that change, `null` for one that goes back to what it is without, or is
    `null` itself where it goes; a model or a GPU by its entry in `catalog`, or `null`. `text` is the whole
    file as it is to be, instead of all these.
    """

    services: Annotated[dict[Name, Entry | None], Field(max_length=MAX_NAMES)] = Field(
        default_factory=dict
    )
    models: Annotated[dict[Name, Entry | None], Field(max_length=MAX_NAMES)] = Field(
        default_factory=dict
    )
    gpus: Annotated[dict[Name, Entry | None], Field(max_length=MAX_NAMES)] = Field(
        default_factory=dict
    )
    machines: Annotated[tuple[AddedMachines, ...], Field(max_length=MAX_NAMES)] = ()
    text: Annotated[str, Field(max_length=MAX_LETTERS)] | None = None

    def describe(self) -> str:
        """Return the edit in a few words, for people."""
        if self.text is not None:
            return "another file"
        said = []
        for name, entry in self.services.items():
            keys = ", ".join(entry) if entry is not None else ""
            said.append(f"{name}: {keys}" if entry is not None else f"{name} removed")
        for each in self.machines:
            word = "more" if each.count > 0 else "fewer"
            said.append(f"{abs(each.count)} {each.node_type} {word} in {each.region}")
        return "; ".join(said) or "nothing"


def edit_text(text: str, edit: FleetEdit) -> str:
    """Return the text of a fleet file with an edit made; InputError names what cannot be."""
    if edit.text is not None:
        return edit.text
    data = parse_yaml(text, path="fleet.yaml").data
    if not isinstance(data, dict):
        raise InputError("this is no fleet file", field="file", hint="it holds no keys")
    return rewrite(text, edit_data(data, edit))


def edit_data(data: Mapping[str, Any], edit: FleetEdit) -> dict[str, Any]:
    """Return the data of a fleet file with an edit made."""
    changed = dict(data)
    key = services_key(data)
    services = _edit_entries(data.get(key) or {}, edit.services, "service")
    if not services:
        raise InputError(
            "no service would be left",
            field="edit.services",
            hint="`atoll down` ends a whole fleet",
        )
    changed[key] = services
    for kind, entries in (("models", edit.models), ("gpus", edit.gpus)):
        if not entries:
            continue
        facts = changed.get("catalog") or {}
        if not isinstance(facts, Mapping):
            raise InputError(
                f"its facts are in {facts}", field=f"edit.{kind}", hint="write them there"
            )
        merged = {**(facts.get(kind) or {}), **entries}
        kept = {name: entry for name, entry in merged.items() if entry is not None}
        changed["catalog"] = {**facts, kind: kept}
    for at, each in enumerate(edit.machines):
        _add_machines(changed, each, f"edit.machines.{at}")
    return changed


def services_key(data: Mapping[str, Any]) -> str:
    """Return under which key a fleet file has its services: the older name is `models`."""
    return "models" if "models" in data and "services" not in data else "services"


def describe_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return in a few words what a fleet file says otherwise than another."""
    said = []
    old, new = (data.get(services_key(data)) or {} for data in (before, after))
    for name in dict.fromkeys((*old, *new)):
        if name not in old:
            model = new[name].get("model", name) if isinstance(new[name], dict) else name
            said.append(f"{name} added ({model})")
        elif name not in new:
            said.append(f"{name} removed")
        elif old[name] != new[name]:
            keys = [
                str(key)
                for key in dict.fromkeys((*old[name], *new[name]))
                if old[name].get(key) != new[name].get(key)
            ]
            said.append(f"{name} changed ({', '.join(keys)})")
    own = {"services", "models"}
    others = [key for key in dict.fromkeys((*before, *after)) if key not in own]
    said += [f"{key} changed" for key in others if before.get(key) != after.get(key)]
    return ", ".join(said) or "nothing that counts"


def _edit_entries(
    known: Mapping[str, Any], edits: Mapping[str, Entry | None], kind: str
) -> dict[str, Any]:
    entries = dict(known)
    for name, edit in edits.items():
        if edit is None:
            if name not in entries:
                raise UnknownNameError(kind, name, entries, field=f"edit.{kind}s.{name[:60]}")
            del entries[name]
            continue
        before = entries.get(name)
        merged = {**(before if isinstance(before, Mapping) else {}), **edit}
        entries[name] = {key: value for key, value in merged.items() if value is not None}
    return entries


def _add_machines(data: dict[str, Any], added: AddedMachines, field: str) -> None:
    """Add machines to the pool or the cluster of `data`, where it has such machines already if it has."""
    if isinstance(data.get("cluster"), Mapping):
        cluster = dict(data["cluster"])
        cluster["nodes"] = _count_more(cluster.get("nodes") or {}, added, field)
        data["cluster"] = cluster
        return
    pool = dict(data.get("pool") or {})
    offers = list(pool.get("offers") or ())
    for at, offer in enumerate(offers):
        if (offer.get("region"), offer.get("node_type")) == (added.region, added.node_type):
            left = int(offer.get("available", 0)) + added.count
            _refuse_negative(left, added, field)
            offers[at] = {**offer, "available": left}
            data["pool"] = {**pool, "offers": offers}
            return
    pool["owned"] = _count_more(pool.get("owned") or {}, added, field)
    data["pool"] = pool


def _count_more(regions: Mapping[str, Any], added: AddedMachines, field: str) -> dict[str, Any]:
    """Return region -> node type -> number (or names) with machines added."""
    kinds = dict(regions.get(added.region) or {})
    known = kinds.get(added.node_type, 0)
    entry = dict(known) if isinstance(known, Mapping) else {}
    listed = known if isinstance(known, list) else entry.get("names")
    if listed is not None:
        if len(added.names) != max(0, added.count):
            raise InputError(
                "these machines have names",
                field=f"{field}.names",
                hint=f"name {pluralize(max(0, added.count), 'machine')} to add",
            )
        value: Any = [*listed, *added.names]
        kinds[added.node_type] = {**entry, "names": value} if entry else value
        return {**regions, added.region: kinds}
    left = int(entry.get("count", 0) if entry else known) + added.count
    _refuse_negative(left, added, field)
    kinds[added.node_type] = {**entry, "count": left} if entry else left
    if left == 0:
        del kinds[added.node_type]
    found = {**regions, added.region: kinds}
    if not kinds:
        del found[added.region]
    return found


def _refuse_negative(left: int, added: AddedMachines, field: str) -> None:
    if left < 0:
        raise InputError(
            f"there are only {left - added.count} {added.node_type} in {added.region}",
            field=f"{field}.count",
            hint="take away fewer",
        )
