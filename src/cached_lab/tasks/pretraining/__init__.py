"""Raw text as pairs of a damaged text and its original."""
