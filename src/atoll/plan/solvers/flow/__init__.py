"""Placing models on the nodes of a fixed cluster so that the most flows through it, network and all."""
