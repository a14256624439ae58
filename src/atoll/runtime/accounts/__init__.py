"""Who may ask for what, how much, and what it used: API keys, limits and a ledger that counts once.

    accounts    what a gateway calls; all of it in memory
    keys        a key as it is made and kept
    grants      a key at work: what it may do, and why it is refused
    limits      rates and quotas: pure
    journal     what runs and is done, on disk before the database knows of it (with slots)
    ledger      from a finished request to rows
    database    SQLite or PostgreSQL (with schema and migrations)
    report      sums and exports

Needs the extra `accounts`.
"""
