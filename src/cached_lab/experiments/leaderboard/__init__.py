"""A leaderboard of memories: a fixed choice of probes by distance, what each memory costs, and who comes first."""
