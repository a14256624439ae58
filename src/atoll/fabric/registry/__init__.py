"""Who is in a fabric: a replicated map as a pure core; events in, effects out, time is a parameter.

records           one signed record per session, and the order that merges them; start reading here
fabric_registry   the rules: what is taken, refused, published, forgotten
effects           what the registry asks its driver to do, its settings, what it refused
replica           the map with hashes of its parts
sync              messages of two replicas that compare; sync_exchange: the asker's side
sites             fabrics of thousands: a registry for every site, and summaries of the others
peers             other members as seen from here, and their load
queries           which members have what one asks for
"""
