"""Runs side by side: where they part, what differs, which findings went and came, and whether a fix worked."""
