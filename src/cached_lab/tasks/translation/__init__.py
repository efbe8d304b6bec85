"""A source and a target."""
