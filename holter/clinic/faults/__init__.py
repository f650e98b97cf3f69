"""The faults of the clinic, a family a file: what each does to a training, and which trainings get it."""
