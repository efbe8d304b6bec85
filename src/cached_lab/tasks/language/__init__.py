"""Language models over streams of text."""
