"""Applications of Ray Serve."""
