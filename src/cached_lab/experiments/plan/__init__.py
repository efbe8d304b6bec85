"""What a training would take, said before it: bytes, operations and hours of a recipe, without its data or a GPU."""
