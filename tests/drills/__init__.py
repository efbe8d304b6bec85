"""Drills: many tries of one kind of trouble, each of which must end well.

    make drills                                      all of them, and the table of docs/results/reliability.md
    python -m drills injection --count 20            some tries of one
    python -m drills injection --case train/last/17  one try again

Those for one drill are given in the folder `tests`, with the package installed.

A drill is one module of this folder (see `frame.Drill`); `make test` tries a sample of each.
"""
