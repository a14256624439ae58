"""A world in virtual time for the controller: days of traffic, prices and failures in seconds."""
