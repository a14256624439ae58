"""What of a flow lasts: requests in flight, the time they stay, and the caches that must hold them."""
