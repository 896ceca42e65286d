"""Sources of LoRA adapters: local folders, the Hugging Face cache, https servers and S3 buckets."""
