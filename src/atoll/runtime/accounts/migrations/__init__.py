"""Changes of the tables, in order; applied when a database is opened."""
