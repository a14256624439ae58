"""Pictures, sound and video from strangers: sniffed, bounded, then decoded.

Begin with `data_urls`: the content of a URL in a request. Nothing that a client says of a file is trusted.

    sniff, media_headers, media_limits  kind by first bytes, size before decoding, how much is allowed
    pictures, sounds, wav, video        decoded within bounds, and written
    remote_media                        fetched from public servers only, never from this network
    media_errors                        what clients are told

May import `core`, and of `runtime` its HTTP.
"""
