"""Settings of the local target."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from atoll.catalog.catalog import Catalog
from atoll.core.paths import state_dir
from atoll.deploy.target import Claim, Deployer, DeployerSettings, StartOrder, TargetSite
from atoll.plan.name_types import Name
from atoll.runtime.endpoints.compile_cache import own_folder

_FIRST_PORT = 8000
"""Port of the first command in a dry run; each further instance gets the next one."""


class LocalSettings(DeployerSettings):
    """This machine as a target.

    `pretend` lets processes of this machine stand for the machines of the pool, whatever those are.
    `compile_cache` is the folder that keeps what engines compile as they start; left out, one in Atoll's
    cache folder; "none": engines keep it where they do by themselves. `split_on_cores` has the stage engine
    split layers that were planned over several GPUs over as many processes, also on cores.
    """

    shares_gpus: ClassVar[bool] = True
    region: Name = "local"
    pretend: bool = False
    compile_cache: str | None = None
    split_on_cores: bool = False

    @property
    def pretends(self) -> bool:
        """Whether processes of this machine stand for others."""
        return self.pretend

    def open(self, site: TargetSite) -> Deployer:
        """Return this machine; GPUs that are real are kept account of in one folder for all fleets."""
        from atoll.deploy.local.gpu_slots import find_machines, pretend_machines
        from atoll.deploy.local.local_deployer import LocalDeployer

        if self.pretend:
            machines, folder = pretend_machines(site.pool), site.folder / "local"
        else:
            machines, folder = find_machines(self.region), state_dir() / "local"
        return LocalDeployer(machines, folder, drain_s=site.drain_s)

    def claim(self, region: str) -> Claim:
        """Claim its own region by name, and what nobody else has where it pretends."""
        return Claim.NAMED if region == self.region else Claim.REST if self.pretend else Claim.NONE

    def programs(self) -> dict[str, object]:
        """Run what this process runs."""
        folder = self.compile_cache or str(own_folder())
        return {
            "atoll": (sys.executable, "-m", "atoll"),
            "python": sys.executable,
            "compile_cache": None if folder == "none" else folder,
            "split_on_cores": self.split_on_cores,
        }

    def is_untouched(self, folder: Path) -> bool:
        """Whether nothing was ever started; opening would make its folder."""
        return self.pretend and not (folder / "local").exists()

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return one shell script with a line for every command."""
        del deployer, catalog
        from atoll.deploy.commands.paste import format_line

        lines = [
            format_line(command, order.instance, _FIRST_PORT + number)
            for number, order in enumerate(orders)
            for command in order.commands
        ]
        return {"local.sh": "\n".join(["#!/bin/sh", *lines, ""])}
