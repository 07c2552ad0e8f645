"""The engines: one vLLM engine in an actor, their pool, who sends requests to them, and how these travel."""
