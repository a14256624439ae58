"""Who is in a fabric: a replicated map as a pure core. Start at `records` and `registry`."""
