"""What runs make of their shared caches."""
