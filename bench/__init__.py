"""`python -m bench`: what the gateway itself costs, from outside, beside what others cost.

For its developers; it is not installed. Operators measure their deployment, engine and all, with
`gateway bench` (`ops.loadtest`).
"""
