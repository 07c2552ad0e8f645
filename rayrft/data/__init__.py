"""What is trained on and how it becomes tokens: tokenizer, images, tasks, demonstrations."""
