"""Kills of nodes, instances and gateways under load."""
