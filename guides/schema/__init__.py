"""JSON schemas, rewritten to keywords that the engines' compilers enforce.

A compiler ignores unknown keywords, and answers then violate the schema. xgrammar, which most
engines use (releases 0.1.8 to 0.1.33 were tried), evaluates only one of `$ref`, `const`,
`enum`, `anyOf`, `allOf` and `type`, and ignores keywords beside it. So a schema is rewritten
(`rewrite`) to equivalent alternatives of one type each (`atom`), without keywords that do not
affect validity. A schema that cannot be rewritten is refused, with the keyword and its location
(`keywords`).

See decision 019 in docs/decisions.
"""
