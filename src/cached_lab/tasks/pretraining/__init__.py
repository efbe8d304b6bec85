"""Raw text as pairs of a damaged text and what is to be restored."""
