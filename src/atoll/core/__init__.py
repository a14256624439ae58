"""The small vocabulary everything else is written in; imports nothing else of Atoll."""
