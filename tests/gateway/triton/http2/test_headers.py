"""The cache of decoded header blocks, which is valid until the HPACK table changes."""

from __future__ import annotations

from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from gateway.triton.http2.headers import BlockDecoder
from tests.support.examples import scale_examples

_NAMES = st.sampled_from(["grpc-status", "grpc-message", "content-type", ":status", "x-any"])
_FIELDS = st.lists(
    st.tuples(_NAMES, st.sampled_from(["0", "200", "application/grpc", "a" * 700])), max_size=2
)


@scale_examples(2)
@given(
    blocks=st.lists(st.tuples(_FIELDS, st.booleans()), min_size=16, max_size=32),
    table=st.sampled_from([0, 64, 256, 4096]),
)
def test_what_a_server_says_again_is_read_as_the_first_time(
    blocks: list[tuple[list[tuple[str, str]], bool]], table: int
) -> None:
    """Any block may add to the server's HPACK table, and later blocks refer to the new entries."""
    server = Encoder()
    server.header_table_size = table
    ours, plain = BlockDecoder(2**16), Decoder(2**16)
    for fields, huffman in blocks:
        block = server.encode(fields, huffman=huffman)
        expected = [(bytes(n), bytes(v)) for n, v in plain.decode(block, raw=True)]
        assert ours.decode(block).fields == expected
