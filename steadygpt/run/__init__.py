"""A run before and while it trains: history, data, launches, plan, memory, schedule, outputs, results, summary."""
