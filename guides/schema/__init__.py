"""Rewriting of JSON schemas to keywords that the engines' grammar compilers enforce.

A compiler ignores keywords that it does not know, and outputs then violate the schema. Most engines
use xgrammar. Its tested releases, 0.1.8 to 0.1.33, evaluate only one of `$ref`, `const`, `enum`,
`anyOf`, `allOf` and `type`, and ignore the others in the same schema. `rewrite` therefore converts
a schema to equivalent alternatives, each for one type (`atom`). Keywords that do not affect
validity are removed. A schema that cannot be rewritten is refused, with the keyword and its
location (`keywords`).

See decision 019 in docs/decisions.
"""
