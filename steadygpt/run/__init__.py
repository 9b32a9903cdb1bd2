"""What a run is before and while it trains: start, plan, memory, schedule, outputs, results, summary."""
