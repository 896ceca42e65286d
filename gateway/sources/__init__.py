"""Sources from which adapters are fetched: local folders, Hugging Face's cache, https servers and
S3 buckets.
"""
