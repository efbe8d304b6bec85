"""Parts shared by several attentions."""
