"""Keeping a plan true: observe, forecast, plan, reconcile. A pure core and a thin shell around it."""
