"""The start of a run: what it resumes, its data, its options, its plan, its folder. Only folder.py writes."""
