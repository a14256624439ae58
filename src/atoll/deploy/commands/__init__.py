"""What the nodes of an instance run: from a plan to commands, for any target and for people to paste."""
