"""Look at what was trained: statistics over seeds, cost, gates, feature maps, plots and reports."""
