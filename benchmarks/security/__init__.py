"""Attacks on gateways, engines and the console."""
