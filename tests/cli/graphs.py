"""A fleet with one model that takes images, which plans in a moment."""

from __future__ import annotations

SMALL = """\
name: small
services:
  look:
    model: qwen2.5-vl-7b
    rate: 3/s
    ttft: 3s
    tpot: 100ms
    classes:
      text: {share: 40%, input: 300, output: 100}
      image+text: {share: 60%, input: 200, output: 100, images: {size: 1280x720}}
pool:
  offers:
    - {region: east, node_type: T4:1, available: 6, usd_per_hour: 0.53}
    - {region: east, node_type: L4:1, available: 6, usd_per_hour: 0.80}
    - {region: east, node_type: L40S:1, available: 2, usd_per_hour: 1.86}
"""

SHORT = SMALL.replace("rate: 3/s", "rate: 40/s")
"""The same with more demand than these nodes can serve."""
