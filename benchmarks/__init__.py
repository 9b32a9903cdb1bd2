"""Each figure of RESULTS.md as a command: python -m benchmarks.NAME, from the repository root."""
