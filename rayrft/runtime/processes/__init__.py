"""Processes that can be killed."""
