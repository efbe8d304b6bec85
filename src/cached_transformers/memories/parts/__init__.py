"""What several memories are made of."""
