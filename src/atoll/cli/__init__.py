"""The command line, one file a verb; `main` loads only the verb that is asked for."""
