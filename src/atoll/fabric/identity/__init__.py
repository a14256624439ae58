"""Who is who in a fabric: certificates, the authority that issues them, a way in, what is believed.

identity       certificates: reading, signing, checking; start reading here
authority      a folder with the CA, its members and what is revoked
access         the token a member joins with
record_trust   which records of others are believed
fabric_keys    names of slots and sessions, and which keys a slot may write
"""
