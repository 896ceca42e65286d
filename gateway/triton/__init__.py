"""Everything that speaks to Triton: the only importer of gRPC and protobuf."""
