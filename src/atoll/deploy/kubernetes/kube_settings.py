"""Settings of a Kubernetes cluster as a target: where instances go, what they run in, how they end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from atoll.deploy.target import DeployerSettings
from atoll.plan.name_types import Name
from atoll.plan.plan import Market


class KubernetesSettings(DeployerSettings):
    """A cluster as a target.

    `image` runs every node unless `images` names another for its service. `region` is where nodes without a
    region label stand, `regions` what plans call the regions of labels ("us-east-2": "aws/us-east-2") where
    that differs, and `market` how nodes without a label of spot machines are paid for; `usd_per_hour`
    is by node type, "L4:1" or "L4:1/spot". `secrets` maps an environment variable to "SECRET/KEY" of a
    Secret that exists; other secrets are made from their files. `weights_claim` (a claim that many pods may
    mount) or `weights_path` (a folder of the node) keeps weights between instances, `compile_cache_claim` or
    `compile_cache_path` what engines compile as they start: code that is executed, so let nobody else write
    there. Without, every pod compiles anew.

    `drain_s` is how long streams may take to end, `schedule_s` how long a pod may wait for a node before it
    counts as failed. `evictable` lets the cluster move a pod without asking; otherwise draining a machine
    waits until the controller, who sees the cordon, has moved the instance.
    """

    image: str = "atoll:latest"
    images: dict[str, str] = Field(default_factory=dict)
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    kubeconfig: str | None = None
    context: str | None = None
    region: Name = "cluster"
    regions: dict[str, Name] = Field(default_factory=dict)
    market: Market = "owned"
    usd_per_hour: dict[str, float] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)
    image_pull_secrets: tuple[str, ...] = ()
    weights_claim: str | None = None
    weights_path: str | None = None
    compile_cache_claim: str | None = None
    compile_cache_path: str | None = None
    shared_memory: str = "16Gi"
    drain_s: int = Field(default=600, ge=1, le=86_400)
    schedule_s: float = Field(default=300.0, ge=0)
    evictable: bool = False
    probe: Literal["exec", "http"] = "exec"
    user: int | None = Field(default=None, ge=1)

    @field_validator("secrets")
    @classmethod
    def _check_references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, reference in secrets.items():
            if reference.count("/") != 1 or not all(reference.split("/")):
                raise ValueError(f"{variable}: write SECRET/KEY")
        return secrets
