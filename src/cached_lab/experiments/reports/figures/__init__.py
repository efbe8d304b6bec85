"""Figures from plain data, all in the look of `style`. Every function returns a matplotlib `Figure` without pyplot.

Empty data, or numbers of another shape or range, raise a ValueError.
"""
