"""Tasks: where they come from, how they are split, and which one is next."""
