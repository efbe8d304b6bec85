"""Memory, operations and hours of a training, planned from its recipe without data or a GPU."""
