"""`python -m bench`: what the gateway costs, measured from outside, beside what others cost."""
