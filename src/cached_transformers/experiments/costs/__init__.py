"""FLOPs, bytes and parameters."""
