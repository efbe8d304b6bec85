"""Experiments with runs: training, comparing, probing, reproducing, measuring and reporting."""
