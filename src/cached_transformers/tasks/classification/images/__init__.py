"""Images with a label each."""
