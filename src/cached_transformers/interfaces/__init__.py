"""What memories, attentions and layers are to each other: the protocols and the records that pass between them."""
