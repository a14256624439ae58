"""The web page: models, machines, plans, keys, chat and what-if in a browser, over HTTP only."""
