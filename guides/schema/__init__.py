"""JSON schemas, made of what the engines' compilers enforce.

A compiler passes over what it does not know, and answers then are not what the schema says.
xgrammar, which most engines compile with (releases 0.1.8 to 0.1.33 were tried), looks at one of
`$ref`, `const`, `enum`, `anyOf`, `allOf` and `type`, and at nothing that stands beside it. So a
schema is written anew (`rewrite`): as alternatives of one type each (`atom`), which say the same,
without keywords that mean nothing for what is valid. What cannot be said so is refused, with the
keyword and its place (`keywords`).
"""
