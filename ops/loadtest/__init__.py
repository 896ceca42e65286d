"""Load on a running deployment, for its operators (`gateway bench`): what is asked, when, of whom.

What the gateway itself costs, beside others and on engines that cost nothing, is measured by the
developers' `bench/`.
"""
