"""Checkpoints: names, content, saves in the background."""
