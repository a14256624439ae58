"""Accounts: API keys, their limits, and a ledger of usage that counts every request once.

Begin with `accounts`: what a gateway calls, all of it in memory. The modules:

    accounts                  admits requests and writes down what they used
    api_keys, grants          a key as it is made and kept; a key at work, and why it is refused
    key_limits                rates and quotas: pure
    shared_rates              limits that all gateways of a database share, by rate_leases (a minute) and
                              count_leases (at the same time, and quotas of strict keys)
    journal, slots            what runs and is done, on disk before the database knows of it
    ledger, gaps              from a finished request to rows; times in which not all was written down
    database, schema          SQLite or PostgreSQL (tables are changed by `migrations`)
    usage_report              sums and exports

Imports nothing of the gateway. Needs the extra `accounts`.
"""
