"""From text to shards: sources, documents, tokenizers."""
