"""What a run is before and while it trains: start, plan, memory, forecast, schedule, outputs, results, summary."""
