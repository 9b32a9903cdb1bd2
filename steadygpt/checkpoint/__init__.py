"""Checkpoints: content, saves in the background, the mirror."""
