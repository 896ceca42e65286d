"""Calls to NVIDIA Triton and its models. Only this package imports gRPC and protobuf."""
