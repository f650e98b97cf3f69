"""Small real trainings through packages that Holter did not write, each trained bare and watched: `make zoo`.

    python -m zoo --list
    python -m zoo --only 'transformers/*' --jobs 2
    python -m zoo --into docs/zoo.md

A training is a function in `zoo/trainings/` and an entry in that file's TRAININGS (see `zoo/training.py`).
Every training, bare or watched, is a process of its own.
"""
