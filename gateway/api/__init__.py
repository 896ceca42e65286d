"""HTTP handlers: they parse a request, run the pipeline and write the answer."""
