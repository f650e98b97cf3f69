"""What is wrong, where, since when, why, and what to change."""
