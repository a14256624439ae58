"""Fleets while the world moves: a week in virtual time, and plan changes under load."""
