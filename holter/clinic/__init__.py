"""The clinic: real trainings with a known fault, their healthy twins, healthy ones that look frightening, a score."""
