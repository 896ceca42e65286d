"""gRPC over HTTP/2 on asyncio, as small as one client of one kind of server can be.

`channel` keeps connections to one endpoint, `connection` is one of them, `call` is one RPC,
`uploads` what still has to be sent; `frames` and `headers` are the bytes. HPACK decoding is the
library's (`hpack`). The framing is ours and not `h2`'s: that library keeps its own account of
every DATA frame, so it cannot be given all frames but those, and DATA is where the time goes.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK), gRPC over HTTP2 (PROTOCOL-HTTP2.md of grpc).
"""
