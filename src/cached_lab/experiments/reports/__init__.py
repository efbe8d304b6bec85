"""Pages, tables and figures of what was run.

`run_folder` reads what a training or a comparison has written, `wording` says it in words, and `run_page`,
`comparison_page`, `probe_page` make of it a page of the blocks in `page`, `markdown` a text (with `variant_table`,
`detection_table`, `cache_use_table`).
`figures` draws, and `collect` takes from a trained model what is drawn of it.

A folder or a file that does not hold what is asked of it raises a ValueError; what is drawn, on a page or alone, takes
matplotlib, without which there is an ImportError.
"""
