"""The demo model, a small Llama model for tests and examples: corpus, training and evaluation."""
