"""Parts shared by several memories."""
