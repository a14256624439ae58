"""What the gateway and the dashboard cost."""
