"""Figures from plain data, all in the look of `style`.

`curves`, `scores` and `gates_and_maps` stand on the pages; `paper` draws the GRC paper's, `attention_patterns` who sees
whom.
"""
