"""How well speech was understood."""
