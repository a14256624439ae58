"""Who may ask for what, how much, and what it used: API keys, limits and a ledger that counts once."""
