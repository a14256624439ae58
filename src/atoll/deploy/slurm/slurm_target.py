"""Slurm in the table of targets: its settings, with what they open."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.core.paths import state_dir
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import Claim, Deployer, DeployError, StartOrder, TargetSite


class SlurmTarget(SlurmSettings):
    """A Slurm cluster as a target; see `SlurmSettings` for its fields."""

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Return a folder and an installation that nodes see too: homes are shared on most clusters."""
        folder, atoll = str(state_dir() / "slurm"), (sys.executable, "-m", "atoll")
        return {"work_folder": folder, "python": sys.executable, "atoll": atoll}

    def open(self, site: TargetSite) -> Deployer:
        """Return the cluster whose commands are installed here; it is one place, whatever the pool says."""
        regions = sorted({offer.region for offer in site.pool})
        if len(regions) > 1:
            raise DeployError(
                f"a Slurm cluster is one region, and the pool has {', '.join(regions)}",
                kind="settings",
                hint=f"give all of its machines the region {self.region!r}, and others another target",
            )
        return SlurmDeployer(self, catalog=site.catalog)

    def claim(self, region: str) -> Claim:
        """Claim the cluster's own region."""
        return Claim.NAMED if region == self.region else Claim.NONE

    def programs(self) -> dict[str, object]:
        """Return what is installed on compute nodes."""
        programs = {"atoll": self.atoll, "python": self.python}
        return {**programs, "compile_cache": self.compile_cache}

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return the batch scripts; they depend on partitions, so the cluster must have answered."""
        del catalog
        if not isinstance(deployer, SlurmDeployer):
            raise DeployError("Slurm's scripts need its partitions", kind="unreachable")
        return {f"{order.file_name}.sh": deployer.dry_run(order) for order in orders}
