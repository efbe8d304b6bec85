"""Pages, tables and figures of finished runs.

Each page (`comparison_page`, `run_page`, `probe_page`, `board_page`) is a function that returns the records of
`blocks`; `terminal`, `markdown` and `page` (HTML) write them. `figures` draws, `collect` reads a trained model.
"""
