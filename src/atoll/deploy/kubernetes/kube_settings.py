"""Settings of a Kubernetes cluster as a target: where instances go, what they run in, how they end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from atoll.core.frozen import Frozen
from atoll.core.ids import parse_node_type
from atoll.deploy.target import DeployerSettings
from atoll.plan.name_types import Name
from atoll.plan.plan import Market

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_QUANTITY = re.compile(r"\d+(\.\d+)?([mkMGTPE]|[KMGTPE]i)?")


class PoolSettings(Frozen):
    """A pool of machines that grows when pods ask for them, to `max` machines, and may be empty."""

    node_type: str
    max: int = Field(ge=0)
    region: Name | None = None
    market: Market | None = None

    @field_validator("node_type")
    @classmethod
    def _check_type(cls, given: str) -> str:
        parse_node_type(given)
        return given


class MatchRule(Frozen):
    """A match expression over a label of machines."""

    key: str = Field(min_length=1)
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if bool(self.values) != (self.operator in ("In", "NotIn")):
            raise ValueError(f"{self.key}: In and NotIn need values, and nothing else has any")
        return self

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether a machine with these labels is meant."""
        if self.operator in ("Exists", "DoesNotExist"):
            return (self.key in labels) == (self.operator == "Exists")
        return (labels.get(self.key) in self.values) == (self.operator == "In")


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
    waits until the controller, who sees the cordon, has moved the instance, but no longer than
    `hold_evictions_s` after a controller acted last.

    `gpu_names` gives the catalog's GPU for a machine's label that does not name it ({"NVIDIA-A10": "A10G"}).
    Nodes ask for `cpus_per_gpu` and as much memory as their GPUs have, or for their GPUs' part of the
    machines that there are where that is less, and may use that part; 0 leaves both to the cluster, and so do
    `requests` and `limits` that name them. These are added to those of GPUs for every node ({"cpu": "8",
    "memory": "64Gi", "rdma/hca": "1"}), `env` to its environment. `tolerations`, `node_selector`,
    `node_affinity` (match expressions that machines must all fit), `priority_class`, `runtime_class`,
    `annotations` and `sidecars` (containers beside the engine) are those of Kubernetes;
    machines that selector, affinity and tolerations leave out are not offered either. `read_only_root` gives
    an engine nowhere to write but volumes: its home is an empty one then.

    `multi_node` is what an instance of several nodes becomes: one LeaderWorkerSet, whose pods restart
    together, or a StatefulSet each; "auto" takes the first where the cluster has it and the nodes are alike.

    `node_pools` are pools that grow, by the names that their machines' labels give; Karpenter's are read
    where they say which GPUs they have. A pod may wait `scale_up_s` for a machine where some can be made.
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
    hold_evictions_s: int = Field(default=300, ge=5, le=86_400)
    probe: Literal["exec", "http"] = "exec"
    user: int | None = Field(default=None, ge=1)
    gpu_names: dict[str, str] = Field(default_factory=dict)
    cpus_per_gpu: int = Field(default=8, ge=0)
    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    node_selector: dict[str, str] = Field(default_factory=dict)
    node_affinity: tuple[MatchRule, ...] = ()
    priority_class: str | None = None
    runtime_class: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict)
    sidecars: tuple[dict[str, Any], ...] = ()
    read_only_root: bool = False
    multi_node: Literal["auto", "leader-worker-set", "stateful-sets"] = "auto"
    node_pools: dict[str, PoolSettings] = Field(default_factory=dict)
    scale_up_s: float = Field(default=900.0, ge=0)

    @field_validator("secrets")
    @classmethod
    def _check_references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, reference in secrets.items():
            if reference.count("/") != 1 or not all(reference.split("/")):
                raise ValueError(f"{variable}: write SECRET/KEY")
        return secrets

    @field_validator("requests", "limits")
    @classmethod
    def _check_quantities(cls, given: dict[str, str]) -> dict[str, str]:
        for resource, quantity in given.items():
            if resource == "nvidia.com/gpu":
                raise ValueError("GPUs are the plan's: leave nvidia.com/gpu out")
            if _QUANTITY.fullmatch(quantity) is None:
                raise ValueError(f"{resource}: {quantity!r} is no quantity; write 8, 500m or 64Gi")
        return given

    @field_validator("env")
    @classmethod
    def _check_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for variable in env:
            if VARIABLE.fullmatch(variable) is None:
                raise ValueError(f"{variable!r} is no name of an environment variable")
        return env

    @field_validator("tolerations")
    @classmethod
    def _check_tolerations(cls, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for each in given:
            unknown = set(each) - {"key", "operator", "value", "effect", "tolerationSeconds"}
            if unknown:
                raise ValueError(f"a toleration has no {min(unknown)!r}")
            if not each.get("key") and each.get("operator") != "Exists":
                raise ValueError("a toleration without a key needs operator: Exists")
        return given

    @field_validator("sidecars")
    @classmethod
    def _check_sidecars(cls, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        names = [each.get("name") for each in given]
        if not all(names) or not all(each.get("image") for each in given):
            raise ValueError("a sidecar needs a name and an image")
        if len({*names, "engine"}) <= len(names):
            raise ValueError("sidecars need names of their own, and 'engine' is taken")
        return given
