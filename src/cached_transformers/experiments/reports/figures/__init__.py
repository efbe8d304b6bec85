"""Figures by subject, all in the look of `style`: `curves`, `scores`, `gates_and_maps`, the paper's, and attention's."""
