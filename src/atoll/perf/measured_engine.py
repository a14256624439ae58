"""An engine's profile as it was measured on a server, where an overlay has one of the same kind.

What was measured of a model holds for that model, on that type of GPU with as many of them splitting a layer,
under that engine, of that version where both say one, and with the scheduling that the version has unless
told. All else is predicted as before. A host time that a fleet file states is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.engines.limits import HostTime
from atoll.engines.profile import read_version
from atoll.engines.table import profile_engine

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.catalog.transformer import TransformerSpec
    from atoll.engines.profile import EngineProfile


def with_measured(
    profile: EngineProfile, spec: TransformerSpec, gpu: GpuType, tp: int
) -> EngineProfile:
    """Return the profile with what the last server of the same kind showed; itself where there is none."""
    for server in reversed(gpu.servers):
        if (server.spec, server.tp, server.engine) != (spec, tp, profile.name):
            continue
        if not _agree(server.version, profile.version):
            continue
        usual = profile_engine(server.engine_name, gpu)
        if usual.schedules_ahead == profile.schedules_ahead:
            return _as_measured(profile, server, keeps_host=profile.host != usual.host)
    return profile


def _agree(one: str | None, other: str | None) -> bool:
    """Whether versions agree as far as both are said."""
    if one is None or other is None:
        return True
    pairs = zip(read_version(one), read_version(other), strict=False)
    return all(mine == theirs for mine, theirs in pairs)


def _as_measured(
    profile: EngineProfile, server: MeasuredServer, *, keeps_host: bool
) -> EngineProfile:
    host = HostTime(step_s=server.step_s, sequence_s=server.sequence_s)
    return replace(
        profile,
        host=profile.host if keeps_host else host,
        launch=profile.launch.scale(server.launch),
        request_s=server.request_s,
        tokenize_s=server.tokenize_s,
        stream_s=server.stream_s,
        measured=server,
    )
