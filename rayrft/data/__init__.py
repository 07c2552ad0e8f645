"""Training data: tokenizer, images, tasks and demonstrations."""
