"""Settings of a Ray cluster as a target: where its head is, what its machines are called, what jobs run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from atoll.deploy.target import DeployerSettings
from atoll.plan.name_types import Name
from atoll.plan.plan import Market, NotNegative


class RaySettings(DeployerSettings):
    """How instances are brought up in one Ray cluster.

    `address` is that of the dashboard, which takes jobs; `token_file` holds the token of a cluster that asks
    for one (RAY_AUTH_MODE=token). `python` and `atoll` are the programs on its machines. `gpu_names` gives
    the catalog's GPU for an accelerator type of Ray that is not called the same ({"A100-80G": "A100-80"};
    "GPU" is for machines that have GPUs and name no type). `cpus_per_gpu` are taken of Ray's count beside a
    GPU. `env` is set for everything that runs. `compile_cache` is a folder of the machines for what engines
    compile as they start; left out, they keep it in the home of Ray's user.

    `vllm_executor` says how vLLM stands on several machines: as ranks of its own, as on other targets, or as
    a server whose workers Ray starts.

    `schedule_s` is how long an instance may wait for room before it counts as failed; with `autoscales`, more
    machines than there are may be asked for. `usd_per_gpu_hour` is by catalog name and 0 where it is not
    given. `deadline_s` ends any request; ended instances are listed for `keep_s`.
    """

    region: Name = "ray"
    address: str = "http://127.0.0.1:8265"
    token_file: str | None = None
    python: str = Field(default="python3", min_length=1)
    atoll: tuple[str, ...] = Field(default=("atoll",), min_length=1)
    compile_cache: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    gpu_names: dict[str, str] = Field(default_factory=dict)
    market: Market = "owned"
    usd_per_gpu_hour: dict[str, NotNegative] = Field(default_factory=dict)
    cpus_per_gpu: float = Field(default=1.0, ge=0)
    vllm_executor: Literal["ranks", "ray"] = "ranks"
    autoscales: bool = False
    schedule_s: float = Field(default=300.0, gt=0)
    deadline_s: float = Field(default=30.0, gt=0)
    keep_s: float = Field(default=3600.0, ge=0)

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if not address.startswith(("http://", "https://")):
            raise ValueError("write the dashboard's address, http://HEAD:8265")
        return address.rstrip("/")
