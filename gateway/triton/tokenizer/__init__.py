"""Whether the gateway and Triton have one tokenizer."""
