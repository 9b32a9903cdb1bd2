"""A run as seen from outside: its state and curves, the table of its checkpoints."""
