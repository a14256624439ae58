"""How a fleet is to be operated: options of `up` and `operate`, and the record that is made of them.

Fields carry what their command line needs, so that `atoll up --help` and Python say the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.listener import Listener
from atoll.core.options import CONFIG_HELP, CORS_HELP, option

if TYPE_CHECKING:
    from atoll.control.operation.control_loop import LoopTurn
    from atoll.control.operation.fleet_change import FleetChange
    from atoll.control.operation.fleet_home import Entrance, FleetHome, FleetRecord, WeightsRecord
    from atoll.deploy.target import InstanceStatus
    from atoll.deploy.target_table import TargetSettings
    from atoll.plan.choice import ModelMix
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.task_fleet.parts import ServedParts

STATE_HELP = "The fleet's folder; default: by its name in the user's state folder."
_DEVICES: tuple[Literal["cpu"], Literal["cuda"]] = ("cpu", "cuda")
_WHERE = "Where instances stand"
_WHAT = "What they serve"
_HOW = "How they are reached"


def _option(panel: str, description: str, default: Any = None, **extra: Any) -> Any:
    return option(default, description, panel=panel, **extra)


_where, _what, _how = (partial(_option, panel) for panel in (_WHERE, _WHAT, _HOW))


class OperationOptions(Frozen):
    """Targets, weights and fabric of a fleet that is brought up or operated.

    What is not given is as it was when the fleet was last brought up.
    """

    on: str | None = _where(
        "Targets: local (default), slurm, kubernetes, ray, joined, ...; several with commas."
    )
    target_file: Path | None = _where(
        "YAML with the settings of targets: slurm: {partitions: [gpu], account: lab}."
    )
    pretend: bool = _where(
        "Let processes of this machine stand for the pool's, on cores; --stand-in implies it.",
        False,
    )
    partition: str | None = _where("slurm: partition; several with commas.")
    account: str | None = _where("slurm: account.")
    qos: str | None = _where("slurm: quality of service.")
    work_folder: Path | None = _where("slurm: a folder that this machine and all nodes see.")
    namespace: str | None = _where("kubernetes: namespace.")
    image: str | None = _where("kubernetes, skypilot: image that instances run in.")
    kubeconfig: Path | None = _where("kubernetes: else $KUBECONFIG or ~/.kube/config.")
    context: str | None = _where("kubernetes: context of the kubeconfig.")
    ray_address: str | None = _where(
        "ray: the head's dashboard; else http://127.0.0.1:8265.", metavar="URL"
    )
    models: tuple[str, ...] = _what(
        "Weights of a service (NAME=SOURCE) or of all: a folder on the nodes, hf://ORG/NAME, s3://...; "
        "default: the catalog's.",
        (),
        flag="--model",
    )
    stand_in: bool = _what(
        "Serve a small model in place of those that no weights are given for, to try a plan.", False
    )
    parts: Path | None = _what(
        "File with components for the parts of any-to-any services.", metavar="FILE"
    )
    stand_in_model: str | None = _what("Which weights stand in. Default: SmolLM2-135M.")
    engine: str | None = _what(
        "auto (default: the simplest that carries the instance), vllm, sglang, ..."
    )
    device: str | None = _what(
        "What Atoll's own engine computes on: cuda (default), cpu (with --pretend)."
    )
    hub_token: Path | None = _what(
        "File with the token for hf:// weights; only its name is told to nodes."
    )
    fabric: str | None = option(
        None,
        "Join this fabric instead of one of its own: token, @FILE or open://HOST:PORT; "
        "else $ATOLL_FABRIC.",
        env="ATOLL_FABRIC",
        panel=_HOW,
        repr=False,
    )
    gateway: str | None = _how(
        "Address of a gateway of that fabric, or of several, with commas between.", metavar="URL"
    )
    admin_token: Path | None = _how(
        "File with the admin token of that gateway: it says what is asked and kept."
    )
    host: str = _how(
        "Where the gateway listens; beyond this machine it asks for keys.", "127.0.0.1"
    )
    port: int = option(8080, "Port of the gateway; 0: any.", panel=_HOW, ge=0, le=65535)
    cors: tuple[str, ...] = _how(CORS_HELP, (), metavar="ORIGIN")
    gateway_config: Path | None = _how(CONFIG_HELP, metavar="FILE")
    address: str | None = _how(
        "Where nodes reach this machine's hub. Default: loopback for local alone, else this machine's "
        "address."
    )
    state: Path | None = option(None, STATE_HELP)


class OperationListener(Listener):
    """Is told what happens to a fleet, and agrees to changes or not; this one agrees to all."""

    def approve(self, change: FleetChange) -> bool:
        """Return whether a change may be made."""
        del change
        return True

    def approve_end(
        self, record: FleetRecord, instances: Sequence[tuple[str, InstanceStatus]], wait_s: float
    ) -> bool:
        """Return whether a fleet may be ended: its instances by target, which have `wait_s` to finish."""
        del record, instances, wait_s
        return True

    def turned(self, turn: LoopTurn) -> None:
        """Take what a turn of the controller saw, decided and did."""


def choose_targets(
    options: OperationOptions, problem: Problem, known: FleetRecord | None
) -> TargetSettings:
    """Return the targets: as given, else as they were."""
    from atoll.deploy.target_table import read_names, read_settings

    names = ("local",) if known is None else known.targets.names
    if options.on is not None:
        names = read_names(options.on)
    given: dict[str, dict[str, object]] = {}

    def tell(target: str, **values: object) -> None:
        told = {key: value for key, value in values.items() if value is not None}
        if told:
            given.setdefault(target, {}).update(told)

    tell(
        "slurm",
        partitions=None if options.partition is None else tuple(options.partition.split(",")),
        account=options.account,
        qos=options.qos,
        work_folder=_text(options.work_folder),
    )
    tell(
        "kubernetes",
        namespace=options.namespace,
        kubeconfig=_text(options.kubeconfig),
        context=options.context,
    )
    tell("ray", address=options.ray_address)
    for target in ("kubernetes", "skypilot"):
        if target in names:
            tell(target, image=options.image)
    if options.pretend or options.stand_in:
        tell("local", pretend=True)
    if options.pretend and "local" not in names:
        raise UsageError(
            "only the local target can pretend", field="pretend", hint="bring it up with `on` local"
        )
    for target in given.keys() - set(names) - {"local"}:
        raise UsageError(
            f"settings of {target} are given, and the fleet is not brought up there",
            hint=f"bring it up there with `on` {target}",
        )
    given = {target: section for target, section in given.items() if target in names}
    before = None if known is None else known.targets
    return read_settings(names, problem, path=options.target_file, given=given, known=before)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def choose_weights(
    options: OperationOptions,
    problem: Problem,
    known: FleetRecord | None,
    *,
    pretends: bool,
    plan: Plan | None = None,
) -> dict[str, WeightsRecord]:
    """Return what serves each service: as given, else as it was, else weights of the plan or the catalog."""
    from atoll.control.operation.fleet_home import WeightsRecord
    from atoll.engines.stage import ENGINE as STAGE
    from atoll.engines.table import AUTO, find_launched
    from atoll.runtime.local.weights import choose_sources, list_needed

    engine = options.engine or AUTO
    if engine != AUTO:
        find_launched(engine, field="engine")
    names = {service.name: service.model for service in problem.plain_services}
    needed = list_needed(names, list(names), problem.catalog(), plan)
    told = bool(options.models) or options.stand_in or options.engine is not None
    kept: Mapping[str, WeightsRecord] = {}
    if known is not None and not told:
        kept = known.weights
    stand_in_source = options.stand_in_model or _default_model()
    chosen = choose_sources(
        [each for each in needed if each.service not in kept],
        options.models,
        _absolute(stand_in_source),
        stand_in=options.stand_in,
        published=True,
    )
    found = dict(kept)
    for name, source in chosen.items():
        # On cores only Atoll's own engine is of use.
        runs = STAGE.name if (pretends or source.stand_in) and engine == AUTO else engine
        found[name] = WeightsRecord(
            source=_absolute(source.source),
            names=(name,),
            engine=runs,
            stand_in=source.stand_in is not None,
            quantization=source.quantization,
            gguf=source.gguf,
        )
    return {name: found[name] for name in names}


def choose_parts(
    options: OperationOptions, problem: Problem, known: FleetRecord | None
) -> dict[str, ServedParts]:
    """Return what runs the parts of any-to-any services: as given, else as it was, else the model's own."""
    graphs = problem.graph_services
    if not graphs:
        return {}
    from atoll.core.extras import require_extras
    from atoll.runtime.task_fleet.parts import choose_parts as choose
    from atoll.runtime.task_fleet.parts_file import read_parts_file

    require_extras("components")
    if options.fabric is not None:
        raise UsageError(
            f"{graphs[0].name} is any-to-any: its graph server stands beside a gateway of the fleet's own",
            field="fabric",
            hint="leave `fabric` out, or give plain models a fleet of their own",
        )
    told = options.parts is not None or options.stand_in
    kept: Mapping[str, ServedParts] = known.parts if known is not None and not told else {}
    given = {} if options.parts is None else read_parts_file(options.parts)
    names = [service.name for service in graphs]
    for name in given:
        if name not in names:
            raise UnknownNameError("any-to-any service", name, names, field="parts")
    catalog = problem.catalog()
    return {
        service.name: kept.get(service.name)
        or choose(service.name, catalog.model(service.model), given, stand_in=options.stand_in)
        for service in graphs
    }


def _default_model() -> str:
    from atoll.engine.weights.sources import DEFAULT_MODEL

    return DEFAULT_MODEL


def _absolute(source: str) -> str:
    """A path that is here is named whole: nodes start elsewhere."""
    return str(Path(source).resolve()) if "://" not in source and Path(source).exists() else source


def home_for(problem: Problem, state: Path | None) -> FleetHome:
    """Return the home of a fleet that is brought up or operated."""
    from atoll.control.operation.fleet_home import FleetHome, home_of

    return FleetHome(state.resolve()) if state is not None else home_of(problem.name)


def check_reach(options: OperationOptions) -> None:
    """Raise UsageError where what is said of the fabric does not go together."""
    if options.gateway is not None and options.fabric is None:
        raise UsageError(
            "a gateway of which fabric?", field="gateway", hint="say which with `fabric` @FILE"
        )
    if options.stand_in and options.fabric is not None:
        raise UsageError(
            "a stand-in is not offered to a fabric of others: who asks there would take it for the real "
            "model",
            field="stand_in",
            hint="leave `fabric` out",
        )


def make_record(
    options: OperationOptions,
    problem: Problem,
    source: Path,
    known: FleetRecord | None,
    mixes: Sequence[ModelMix] = (),
    plan: Plan | None = None,
) -> FleetRecord:
    """Return how a fleet is to be operated: as given, else as it was, else as a plan says.

    `mixes` settled its problem.
    """
    from atoll.control.operation.fleet_home import FleetRecord

    _check_dealt(options, mixes, known)
    targets = choose_targets(options, problem, known)
    weights = choose_weights(options, problem, known, pretends=targets.pretends, plan=plan)
    hub_token = None if known is None else known.hub_token
    if options.hub_token is not None:
        hub_token = str(options.hub_token.resolve())
    device = None if known is None else known.device
    if options.device is not None:
        device = next((name for name in _DEVICES if name == options.device), None)
        if device is None:
            raise UnknownNameError("device", options.device, _DEVICES, field="device")
    return FleetRecord(
        name=problem.name,
        source=str(source),
        device=device,
        targets=targets,
        weights=weights,
        hub_token=hub_token,
        entrance=None if known is None else known.entrance,
        since_s=time.time() if known is None or not known.up else known.since_s,
        mixes=tuple(mixes),
        parts=choose_parts(options, problem, known),
    )


def _check_dealt(
    options: OperationOptions, mixes: Sequence[ModelMix], known: FleetRecord | None
) -> None:
    """Raise UsageError where nobody could tell the gateway which models answer a choice."""
    entrance = None if known is None else known.entrance
    if options.fabric is None:
        told = entrance is None or entrance.hub is not None or entrance.admin_token is not None
    else:
        given = options.gateway is not None and options.admin_token is not None
        told = given or (entrance is not None and entrance.admin_token is not None)
    if mixes and not told:
        raise UsageError(
            f"requests for {mixes[0].name} are dealt to several models, and no gateway can be told so",
            field="gateway",
            hint="name the fabric's gateway with `gateway` and `admin_token`, or leave `fabric` out",
        )


def token_file(options: OperationOptions, home: FleetHome, record: FleetRecord) -> str:
    """Return the file that instances will join with; it need not be there yet."""
    if options.fabric is not None and options.fabric.startswith("@"):
        return str(Path(options.fabric[1:]).resolve())
    if options.fabric is not None:
        return str(home.folder / "fabric" / "given.token")
    if record.entrance is not None:
        return record.entrance.token
    return str(home.folder / "fabric" / "instances.token")


def open_fleet_entrance(
    options: OperationOptions, home: FleetHome, record: FleetRecord
) -> Entrance:
    """Return hub and gateway of a fleet, running: those of others that are named, else its own."""
    from atoll.control.operation.entrance import (
        EntranceSettings,
        find_address,
        open_entrance,
        use_fabric,
    )
    from atoll.control.operation.graph_entrance import write_graph_config
    from atoll.runtime.gateway.standalone import read_settings

    if options.fabric is not None:
        known = record.entrance
        token = None if options.admin_token is None else str(options.admin_token.resolve())
        if options.gateway is None and known is not None and known.hub is None:
            # Its gateway is as it was, though the token may be another.
            token = token or known.admin_token
            urls = None if known.url is None else ",".join((known.url, *known.others))
            return use_fabric(home, options.fabric, urls, token)
        return use_fabric(home, options.fabric, options.gateway, token)
    if record.entrance is not None and record.entrance.hub is None:
        return record.entrance
    only_local = record.targets.names == ("local",)
    address = options.address or ("127.0.0.1" if only_local else find_address())
    given = read_settings(options.gateway_config, options.cors)
    settings = EntranceSettings(address, options.host, options.port, given)
    write_graph_config(home, record.parts)
    return open_entrance(home, record.name, settings, record.entrance)
