"""Exact renting by decomposition: whole mixes of templates a role, priced against each other."""
