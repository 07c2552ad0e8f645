"""Evaluation without training, and the difficulty of tasks."""
