"""Kubernetes in the table of targets: its settings, with what they open."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import workload_name
from atoll.deploy.kubernetes.manifests import COMPILED, write_manifests
from atoll.deploy.target import Claim, Deployer, StartOrder, TargetSite


class KubernetesTarget(KubernetesSettings):
    """A namespace of a cluster as a target; see `KubernetesSettings` for its fields."""

    def open(self, site: TargetSite) -> Deployer:
        """Return the namespace of the cluster that these settings name."""
        return KubernetesDeployer.connect(self, site.catalog, site.fleet)

    def claim(self, region: str) -> Claim:
        """Claim the regions that are named."""
        return Claim.NAMED if region in (self.region, *self.regions.values()) else Claim.NONE

    def programs(self) -> dict[str, object]:
        """Return where pods find what engines compiled before, if a volume keeps it."""
        kept = self.compile_cache_claim or self.compile_cache_path
        return {"compile_cache": COMPILED} if kept else {}

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return the manifests that would be applied, a file for every instance."""
        del deployer
        names = (workload_name(one.labels.fleet, one.labels.instance) for one in orders)
        texts = (write_manifests(order, self, catalog) for order in orders)
        return {f"{name}.yaml": text for name, text in zip(names, texts, strict=True)}
