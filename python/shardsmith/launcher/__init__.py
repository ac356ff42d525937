"""Starts the ranks of one machine and answers for them. Imports no torch."""
