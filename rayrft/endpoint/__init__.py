"""The endpoint: the live policy served by the API of OpenAI, with every call recorded for training."""
