"""Objects in images, as boxes and masks."""
