"""What several attentions are made of."""
