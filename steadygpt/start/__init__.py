"""The start of a run: what it resumes, its data, options, plan and folder. Only folder.py writes, except downloads."""
