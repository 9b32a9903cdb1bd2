"""The start of a run: what it continues, its data, its settled options, its plan. All of it only reads."""
