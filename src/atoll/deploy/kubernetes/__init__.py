"""The Kubernetes target: instances as StatefulSets of a namespace, by server-side apply.

kube_target       the row in the table of targets; kube_settings: its fields
kube_deployer     start, drain, stop and list; start reading here
manifests         an instance as objects; labels: what they carry
workload_status   the status of an instance from its objects
kube_machines     machines with GPUs as offers
kube_lease        which controller acts
kube_client       the few requests that are made; kube_transport: how they reach a real API server
"""
