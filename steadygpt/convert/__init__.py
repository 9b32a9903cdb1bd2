"""Models of other projects."""
