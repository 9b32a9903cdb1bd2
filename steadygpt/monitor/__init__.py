"""A run seen from outside: its state and curves, and the table of its checkpoints."""
