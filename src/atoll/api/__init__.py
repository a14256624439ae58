"""The front door: what a notebook or a service uses."""
