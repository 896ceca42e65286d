"""`gateway client`: one request straight to Triton, with the output of Triton's example clients."""
