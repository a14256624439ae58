"""Instances as workloads of a Kubernetes cluster, by server-side apply."""
