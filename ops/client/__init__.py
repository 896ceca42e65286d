"""`gateway client`: one request straight to Triton, told as its reference clients tell it."""
