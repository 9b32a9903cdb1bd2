"""A run as seen from outside."""
