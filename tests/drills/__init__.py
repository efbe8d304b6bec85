"""Drills: many random cases of one kind of trouble, each of which must end well.

    make drills                                      all drills, and the table of docs/results/reliability.md
    python -m drills injection --count 20            some cases of one drill
    python -m drills injection --case train/last/17  one case again
    python -m drills.elastic --help                  kills under torchrun, outside of the table

Run them in the folder `tests` with the package installed. A drill is one module of this folder (see `frame.Drill`);
`make test` runs a sample of each.
"""
