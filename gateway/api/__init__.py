"""HTTP handlers of a few lines each: parse, run the pipeline, frame the answer."""
