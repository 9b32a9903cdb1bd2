"""Preparation of shards from sources of text."""
