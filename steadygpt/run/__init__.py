"""What a run is before and while it trains: start, plan, schedule, results."""
