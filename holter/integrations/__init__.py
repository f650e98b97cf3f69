"""Holter inside other people's training loops: a file for each. Nothing of them is imported until it is asked for."""
