"""Pages, tables and figures of finished runs.

`run_folder` reads folders of runs and comparisons. `comparison_page`, `run_page`, `probe_page` and `leaderboard_page`
describe them as the records of `blocks`, which `terminal`, `markdown` and `page` (HTML) write. `figures` draws, and
`collect` takes from a trained model the data of the figures.
"""
