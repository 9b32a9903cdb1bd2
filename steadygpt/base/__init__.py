"""Options, durable files, retries, progress; independent of training."""
