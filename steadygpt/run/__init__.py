"""The work around a step: its record, saves and their names, the comparison of repeated steps, the summary."""
