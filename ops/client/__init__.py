"""`gateway client`: one request straight to Triton, printed as its reference clients print it."""
