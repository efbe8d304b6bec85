"""Interfaces between memories, attentions and layers: protocols, and the records that pass between them."""
