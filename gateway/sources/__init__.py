"""Where adapters come from: folders, Hugging Face's cache, https and S3."""
