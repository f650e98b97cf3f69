"""A live dashboard of the runs under a directory. It reads journals; no training serves anything."""
