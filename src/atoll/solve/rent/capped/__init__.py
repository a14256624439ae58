"""A service on its own within what can be had: sharper bounds and better mixes where machines are scarce."""
