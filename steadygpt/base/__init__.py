"""Options, durable files, retries, progress: knows nothing of training."""
