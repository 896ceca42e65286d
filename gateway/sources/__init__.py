"""Sources of adapters: folders, Hugging Face's cache, https and S3."""
