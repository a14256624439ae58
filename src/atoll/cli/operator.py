"""`atoll operator`: keeps the Fleets of a Kubernetes namespace."""

from __future__ import annotations

from pathlib import Path

import typer

from atoll.cli.operate import stopping
from atoll.cli.options import VerbSettings, verb
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.paths import state_dir
from atoll.core.quantities import Duration
from atoll.report.terminal import note

app = typer.Typer(add_completion=False)


class OperatorOptions(VerbSettings):
    """Options of `atoll operator`."""

    namespace: str = option("atoll", "Namespace of Fleets and of what they consist of.")
    target_file: Path | None = option(
        None, "YAML with settings for all fleets: kubernetes: {image: atoll:1.2}."
    )
    kubeconfig: Path | None = option(None, "Else $KUBECONFIG, ~/.kube/config or the pod's account.")
    context: str | None = option(None, "Context of the kubeconfig.")
    gateway: str | None = option(
        None, "Address of the gateway, or of several, with commas between.", metavar="URL"
    )
    admin_token: Path | None = option(None, "File with the gateway's admin token.")
    every: Duration = option("5min", "How often plans are made anew, at least.")
    look: Duration = option("10s", "How often Fleets are looked at.")
    state: Path | None = option(
        None, "Folder of files and homes; default: the user's state folder."
    )


@verb(app, OperatorOptions)
def operator(options: OperatorOptions) -> None:
    """Keep a controller for each Fleet of a namespace, and write into each what becomes of it.

    `kubectl get fleets` shows cost and readiness, `kubectl describe fleet` the plan, instances, promises
    and decisions. The fabric that instances join is $ATOLL_FABRIC. SIGTERM and Ctrl-C end controllers and
    leave fleets serving.
    """
    require_extras("serve", "fabric")
    from atoll.control.operation.fleet_operator import (
        ClusterOperator,
        OperatorSettings,
        run_operator,
    )
    from atoll.deploy.kubernetes.kube_client import KubeClient
    from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
    from atoll.deploy.kubernetes.kube_transport import ClusterTransport
    from atoll.deploy.target_table import read_target_file

    file = options.target_file
    given: dict[str, object] = {"namespace": options.namespace}
    given |= {} if file is None else read_target_file(file, ("kubernetes",)).get("kubernetes", {})
    if options.kubeconfig is not None:
        given["kubeconfig"] = str(options.kubeconfig)
    if options.context is not None:
        given["context"] = options.context
    target = KubernetesSettings.parse(given, path=file)
    arguments = [f"--every={options.every:g}s", f"--look={options.look:g}s"]
    arguments += [f"--gateway={options.gateway}"] if options.gateway else []
    arguments += [f"--admin-token={options.admin_token}"] if options.admin_token else []
    transport = ClusterTransport(target.kubeconfig, target.context)
    kept = ClusterOperator(
        KubeClient(transport, target.namespace),
        OperatorSettings(options.state or state_dir() / "operator", target, tuple(arguments)),
    )
    with stopping("fleets go on serving") as stop:
        run_operator(kept, options.look, stop.wait, note)
