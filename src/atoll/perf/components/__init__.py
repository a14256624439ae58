"""How long components of any-to-any models take, and what executors that share a device can carry."""
