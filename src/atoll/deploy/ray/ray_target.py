"""Ray in the table of targets: its settings, with what they open."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.deploy.ray.ray_client import HttpRayClient
from atoll.deploy.ray.ray_deployer import RayDeployer
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.deploy.target import Claim, Deployer, DeployError, StartOrder, TargetSite


class RayTarget(RaySettings):
    """A Ray cluster as a target; see `RaySettings` for its fields."""

    def open(self, site: TargetSite) -> Deployer:
        """Return the cluster whose head these settings name."""
        client = HttpRayClient(self.address, deadline_s=self.deadline_s, token_file=self.token_file)
        return RayDeployer(client, self, catalog=site.catalog, drain_s=site.drain_s)

    def claim(self, region: str) -> Claim:
        """Claim the cluster's own region."""
        return Claim.NAMED if region == self.region else Claim.NONE

    def programs(self) -> dict[str, object]:
        """Return what is installed on the cluster's machines, and who starts vLLM's workers there."""
        programs = {"atoll": self.atoll, "python": self.python, "executor": self.vllm_executor}
        return {**programs, "compile_cache": self.compile_cache}

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return the orders of jobs; they name accelerators, so the cluster must have answered."""
        del catalog
        if not isinstance(deployer, RayDeployer):
            raise DeployError("orders of Ray need its machines", kind="unreachable")
        return {f"{one.file_name}.json": deployer.dry_run(one) for one in orders}
