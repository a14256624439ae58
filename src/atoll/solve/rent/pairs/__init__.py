"""Exact renting by column generation over (role, region) pairs: `master`, its prices, the search."""
