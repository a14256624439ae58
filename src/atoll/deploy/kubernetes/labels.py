"""One label set: what an object says about its instance, within what Kubernetes lets a label hold.

A value has at most 63 characters of a small alphabet. One that has more, or others, is cut and gets a digest;
what it was stands in full in an annotation, which is what is read back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from atoll.core.errors import InputError
from atoll.deploy.labels import Labels

DOMAIN = "atoll-serving.github.io"
FULL = f"{DOMAIN}/labels"
"""The annotation that holds the labels as they are."""
NODE = f"{DOMAIN}/node"
MANAGER = "atoll"

_LEGAL = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
DIGEST_CHARACTERS = 12
# A pod is called NAME-INDEX-0 and carries a label of that and another 11 characters: 63 in all.
MAX_NAME_CHARACTERS = 42


def label_value(text: str) -> str:
    """Return text as a label's value: itself where that is legal, else what can be kept and a digest."""
    if not text or _LEGAL.fullmatch(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: 63 - DIGEST_CHARACTERS - 1].strip("-_.")
    return f"{kept}-{_digest(text)}" if kept else _digest(text)


def workload_name(fleet: str, instance: str) -> str:
    """Return what an instance's objects are called: the same for the same instance, legal for any.

    The digest is of both names, so that fleets may share a namespace.
    """
    kept = re.sub(r"[^a-z0-9]+", "-", instance.lower())[
        : MAX_NAME_CHARACTERS - DIGEST_CHARACTERS - 7
    ].strip("-")
    digest = _digest(f"{fleet}\n{instance}")
    return f"atoll-{kept}-{digest}" if kept else f"atoll-{digest}"


def lease_name(fleet: str) -> str:
    """Return what the Lease of a fleet's controller is called."""
    return workload_name(fleet, "controller")


def object_labels(labels: Labels) -> dict[str, str]:
    """Return the labels of every object of an instance."""
    return {
        "app.kubernetes.io/name": "atoll",
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/instance": workload_name(labels.fleet, labels.instance),
        "app.kubernetes.io/part-of": label_value(labels.fleet),
        "app.kubernetes.io/managed-by": MANAGER,
        **{
            f"{DOMAIN}/{key}": label_value(str(value)) for key, value in labels.model_dump().items()
        },
    }


def select_fleet(fleet: str) -> str:
    """Return the selector of everything that a fleet's instances consist of."""
    return (
        f"app.kubernetes.io/managed-by={MANAGER},app.kubernetes.io/component=engine,"
        f"{DOMAIN}/fleet={label_value(fleet)}"
    )


def belongs_to(pod: Mapping[str, Any], fleet: str, namespace: str) -> bool:
    """Return whether a pod of any namespace is one of a fleet's instances."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    return bool(
        meta.get("namespace", namespace) == namespace
        and labels.get("app.kubernetes.io/managed-by") == MANAGER
        and labels.get(f"{DOMAIN}/fleet") == label_value(fleet)
    )


def can_be_found(made: Mapping[str, Any], name: str) -> bool:
    """Return whether an object has the labels by which what belongs to a workload is selected."""
    labels = made["metadata"].get("labels") or {}
    return bool(
        labels.get("app.kubernetes.io/managed-by") == MANAGER
        and labels.get("app.kubernetes.io/instance") == name
        and f"{DOMAIN}/fleet" in labels
    )


def select_instance(name: str) -> str:
    """Return the selector of what belongs to a workload."""
    return f"app.kubernetes.io/managed-by={MANAGER},app.kubernetes.io/instance={name}"


def read_labels(annotations: Mapping[str, str]) -> Labels | None:
    """Return the labels an object was given; None for one that is not ours or was tampered with."""
    text = annotations.get(FULL)
    if text is None:
        return None
    try:
        return Labels.from_json(text)
    except InputError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
