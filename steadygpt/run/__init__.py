"""What surrounds a step: its record, saves, repeated steps, the schedule of names, the summary."""
