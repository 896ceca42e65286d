"""A minimal client of gRPC over HTTP/2 on asyncio, for one kind of server.

`channel` holds the connections to one endpoint, `connection` is one of them, `call` is one RPC,
`uploads` are the bytes still to be sent; `frames` and `headers` are the wire format. HPACK is
decoded by the library `hpack`. The framing is ours and not `h2`'s: that library accounts for every
DATA frame, so it cannot be given only the other frames, and DATA takes most of the time.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK), gRPC over HTTP2 (PROTOCOL-HTTP2.md of grpc).

See decision 052 in docs/decisions.
"""
