"""A trained model in use: sampling of text, scores on tasks."""
