"""ListOps of the Long Range Arena."""
