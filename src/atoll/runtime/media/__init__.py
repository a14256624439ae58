"""Pictures, sound and video from strangers: sniffed, bounded, then decoded."""
