"""What is done with runs: comparing, probing, reproducing, measuring and reporting."""
