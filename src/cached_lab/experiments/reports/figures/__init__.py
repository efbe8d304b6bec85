"""Figures from plain data in the look of `style`. Every function returns a matplotlib `Figure` without pyplot."""
