"""Telemetry of a running Atoll: structured logs, metrics, spans, usage and recordings of traffic.

    logs                one JSON object a line
    metrics             counters and histograms for Prometheus
    spans               OpenTelemetry spans, and the W3C trace context
    usage_record        what a request used; traffic_page: sums by model, for controllers
    traffic_recording   traces without content, to plan with
    background          work that must not slow requests down

Start reading at `usage_record`. May import `core` only.
"""
