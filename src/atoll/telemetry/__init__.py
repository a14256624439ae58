"""What a running Atoll says about itself: structured logs, trace context, usage, metrics.

Nothing here knows what it is used for; every package above may use it.
"""
