"""Minimal asyncio client for gRPC over HTTP/2, made for Triton.

Modules: `channel` manages the connections to one endpoint. `connection` is one HTTP/2 connection.
`call` is one RPC. `uploads` sends long requests. `frames` and `headers` encode and decode the wire
format. The library `hpack` decodes header blocks. The library `h2` is not used, because every DATA
frame would have to pass through it. This would be too slow, because most of the time is spent on
DATA frames.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK), gRPC over HTTP2 (PROTOCOL-HTTP2.md of grpc).

See decision 052 in docs/decisions.
"""
