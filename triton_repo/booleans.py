"""Parser of boolean parameters in config.pbtxt, shared by checks and models.

A copy is rendered beside each Python model, so it imports nothing of this project. Upstream's
models and backend silently read other words as false, or as a default.
"""

TRUE, FALSE = ("true", "1"), ("false", "0")
"""Words that `tensorrt_llm` accepts, in any case. In C++ every other word is false."""
MODEL_TRUE, MODEL_FALSE = (*TRUE, "t", "yes", "y"), (*FALSE, "f", "no", "n")
"""Words that preprocessing, postprocessing and tensorrt_llm_bls accept, in any case."""


def parse_boolean(value: str, *, of_text_model: bool = False) -> bool:
    """Return the value that the engine's backend, or a text model, reads.

    Raises ValueError, which lists the accepted words, for any other word.
    """
    true, false = (MODEL_TRUE, MODEL_FALSE) if of_text_model else (TRUE, FALSE)
    word = value.lower()
    if word in true:
        return True
    if word in false:
        return False
    raise ValueError(f"found {value!r}; allowed: true or false")
