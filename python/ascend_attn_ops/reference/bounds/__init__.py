"""Bounds on the results of each operator."""
