"""Small fleets that plan in a moment: two models, four node types, at most three nodes an instance."""

from __future__ import annotations

BUSY = """\
services:
  chat: {model: phi-4-14b, ttft: 1200ms, tpot: 80ms, rate: 16/s, lengths: 512x128}
  mini: {model: llama-3.1-8b, ttft: 900ms, tpot: 60ms, rate: 2/s, lengths: 512x128, phases: together}
pool:
  offers:
    - {region: east, node_type: L4:1, available: 8, usd_per_hour: 0.80}
    - {region: east, node_type: L40S:1, available: 1, usd_per_hour: 1.86}
    - {region: east, node_type: T4:1, available: 4, usd_per_hour: 0.53}
    - {region: west, node_type: A10G:1, available: 4, usd_per_hour: 1.01}
settings: {max_nodes_per_instance: 3}
"""
"""More demand than these nodes can serve."""

FLEET = BUSY.replace("rate: 16/s", "rate: 10/s")
"""The same with demand that can be met with layouts of all kinds, and nearly with those that engines run."""

FREE = FLEET.replace("settings: {", "settings: {engines: [free], ")
"""The same with any layout, also one that no engine runs."""

SHORT = BUSY.replace("available: 8", "available: 2").replace("available: 4", "available: 1")
"""The same as `BUSY` with far too few nodes."""

FAILS = SHORT.replace("settings: {", "settings: {on_shortage: fail, ")
"""The same where serving a part is not wanted."""

TIGHT = BUSY.replace("available: 4, usd_per_hour: 1.01", "available: 1, usd_per_hour: 1.01")
"""The same as `BUSY` where a little more decoding, or a little more time for it, would do."""
