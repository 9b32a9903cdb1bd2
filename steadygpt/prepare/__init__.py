"""From sources of text to shards."""
