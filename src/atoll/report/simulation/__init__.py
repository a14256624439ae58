"""A simulation for people: tables for the terminal, a page and a notebook's cell."""
