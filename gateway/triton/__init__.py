"""Communication with Triton: the only package that imports gRPC and protobuf."""
