"""Booleans among the parameters of a config.pbtxt: one reader for checks and models.

It is rendered beside each model in Python, so it imports nothing of this project. What it does not
know, upstream's models and backend read in silence as false, or as a default.
"""

TRUE, FALSE = ("true", "1"), ("false", "0")
"""Words that `tensorrt_llm` reads, in upper or lower case: in C++ every other word is false."""
MODEL_TRUE, MODEL_FALSE = (*TRUE, "t", "yes", "y"), (*FALSE, "f", "no", "n")
"""Words that preprocessing, postprocessing and tensorrt_llm_bls read, in upper or lower case."""


def parse_boolean(value: str, *, of_text_model: bool = False) -> bool:
    """Return what the engine's backend, or a text model, reads.

    Raises ValueError for a word that it does not know, with those that it does.
    """
    true, false = (MODEL_TRUE, MODEL_FALSE) if of_text_model else (TRUE, FALSE)
    word = value.lower()
    if word in true:
        return True
    if word in false:
        return False
    raise ValueError(f"found {value!r}; allowed: true or false")
