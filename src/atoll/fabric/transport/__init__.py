"""The registry's driver over zenoh: members, hubs and the links between them.

fabric            what other packages use: join, announce, see peers; start reading here
hub               the process that members dial; eviction: revoked members are cut off
link              zenoh and the event loop; zenoh_config: how it is set up
fabric_settings   times and limits
forward           through an HTTP proxy
panics            failures inside zenoh, contained
"""
