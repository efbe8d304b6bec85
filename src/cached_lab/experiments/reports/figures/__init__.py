"""Figures from plain data, all in the look of `style`.

`curves`, `scores` and `gates_and_maps` stand on the pages; `paper` draws the GRC paper's, `attention_patterns` who sees
whom. Where there is nothing to draw, or numbers have another shape or range than is asked, they raise a ValueError.
"""
