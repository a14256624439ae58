"""Configuration of zenoh: listeners, peers to dial, timeouts, and certificates."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from typing import Any

import zenoh
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.silent_links import KEEP_ALIVES, transport_lease_s

_MAX_MESSAGE_BYTES = 32 * 2**20
_MAX_SESSIONS = 2 * keys.MAX_SLOTS
"""Links one hub takes: all members, with some that are not yet known to be gone."""


def session_config(
    access: Access,
    settings: FabricSettings,
    endpoints: Sequence[str],
    listen: Sequence[str],
    denied: frozenset[str],
) -> zenoh.Config:
    """Return the configuration of a client that dials `endpoints`, or of a hub that listens too."""
    protocol = "tcp" if access.is_open else "tls"
    lease_s = transport_lease_s(settings)
    transport: dict[str, Any] = {
        "unicast": {"max_sessions": _MAX_SESSIONS, "accept_pending": 1000},
        "link": {
            "protocols": [protocol],
            "tx": {
                "lease": round(lease_s * 1000),
                "keep_alive": round(KEEP_ALIVES * lease_s / settings.lease_s),
            },
            "rx": {"max_message_size": _MAX_MESSAGE_BYTES},
        },
        "shared_memory": {"enabled": False},
    }
    if not access.is_open:
        transport["link"]["tls"] = _tls(access)
    config: dict[str, Any] = {
        "mode": "router" if listen else "client",
        "scouting": {
            "delay": 0,
            "multicast": {"enabled": False},
            "gossip": {"enabled": False},
        },
        "transport": transport,
        "connect": {
            "endpoints": [f"{protocol}/{endpoint}" for endpoint in endpoints],
            "timeout_ms": 0,
            "exit_on_failure": not listen,
            "retry": retry(settings, random.SystemRandom()),
        },
    }
    if listen:
        config["listen"] = {
            "endpoints": [f"{protocol}/{address}" for address in listen],
            "exit_on_failure": True,
            "timeout_ms": 0,
        }
        if not access.is_open:
            config["access_control"] = keys.hub_rules(access.slots, denied, by_site=access.by_site)
            config["low_pass_filter"] = keys.hub_sizes(by_site=access.by_site)
    return zenoh.Config.from_json5(json.dumps(config))


def retry(settings: FabricSettings, rng: random.Random) -> dict[str, object]:
    """Return how a session dials again: every one at its own pace, so that all do not come at once.

    Bounded: never sooner than half of `retry_first_s`, never later than three times `retry_max_s`.
    """
    return {
        "period_init_ms": round(settings.retry_first_s * rng.uniform(500, 1500)),
        "period_max_ms": round(settings.retry_max_s * rng.uniform(1000, 3000)),
        "period_increase_factor": round(rng.uniform(1.5, 3.0), 2),
    }


def _tls(access: Access) -> dict[str, object]:
    assert access.authority is not None
    assert access.certificate is not None
    assert access.key is not None
    certificate, key = _pem(access.certificate), _key_pem(access.key)
    return {
        "root_ca_certificate_base64": _pem(access.authority),
        "listen_certificate_base64": certificate,
        "listen_private_key_base64": key,
        "connect_certificate_base64": certificate,
        "connect_private_key_base64": key,
        "enable_mtls": True,
        # A hub is whoever the authority let stand for a server, wherever it is reached: through a
        # forwarder, under a new address. Members' certificates do not do for one.
        "verify_name_on_connect": False,
        "close_link_on_expiration": True,
    }


def _pem(certificate: bytes) -> str:
    parsed = x509.load_der_x509_certificate(certificate)
    return base64.b64encode(parsed.public_bytes(serialization.Encoding.PEM)).decode()


def _key_pem(key: bytes) -> str:
    parsed = serialization.load_der_private_key(key, None)
    pem = parsed.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return base64.b64encode(pem).decode()
