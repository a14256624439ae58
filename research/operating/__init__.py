"""Checks of operation in virtual time: event by event, against a table of a paper, forecasts scored."""
