"""What arrives: requests, their lengths, and when they come."""
