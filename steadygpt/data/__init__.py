"""What training reads: shards and the order of their rows, tokenizers, tasks."""
