"""Rewriting of JSON schemas to keywords that the engines' grammar compilers enforce.

A compiler ignores unknown keywords, and answers then violate the schema. xgrammar, which most
engines use (releases 0.1.8 to 0.1.33 were tried), evaluates only one of `$ref`, `const`, `enum`,
`anyOf`, `allOf` and `type`, and ignores the others in the same schema. So a schema is rewritten
(`rewrite`) to equivalent alternatives, each for one type (`atom`). Keywords that do not affect
validity are removed. A schema that cannot be rewritten is refused, with the keyword and its
location (`keywords`).

See decision 019 in docs/decisions.
"""
