"""Explorer: lets the current model act on tasks, on vLLM engines, through workflows."""
