"""Settings of machines that joined as a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.catalog.catalog import Catalog
from atoll.deploy.target import Claim, Deployer, DeployerSettings, StartOrder, TargetSite
from atoll.plan.name_types import Name


class JoinedSettings(DeployerSettings):
    """Machines that joined the fleet's fabric with `atoll join` and nothing to serve, as a target.

    All of them are one `region`. `fabric` is the file with an operator's token, with which they are told
    what to run; left out, that of the fleet's own fabric.
    """

    region: Name = "joined"
    fabric: Path | None = None

    def open(self, site: TargetSite) -> Deployer:
        """Return the machines; nobody is asked before there is something to ask."""
        from atoll.deploy.joined.joined_deployer import JoinedDeployer
        from atoll.deploy.joined.machine_fabric import MachineFabric

        token = self.fabric or site.folder / "fabric" / "fabric.token"
        return JoinedDeployer(MachineFabric.of(token, self.region), drain_s=site.drain_s)

    def claim(self, region: str) -> Claim:
        """Claim its own region."""
        return Claim.NAMED if region == self.region else Claim.NONE

    def is_untouched(self, folder: Path) -> bool:
        """Whether nothing was ever started: a fleet without a fabric has no machines."""
        return self.fabric is None and not (folder / "fabric").exists()

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return what machines would be told: the recipe of each instance."""
        del catalog, deployer
        from atoll.deploy.joined.joined_deployer import write_part

        return {f"{one.file_name}.json": write_part(one) for one in orders}
