"""Solvers: each takes a `Problem` and returns a `Plan`; nothing outside planning imports them."""
