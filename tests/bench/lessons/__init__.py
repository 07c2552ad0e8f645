"""Runs that show that models learn, with controls: each prints a table."""
