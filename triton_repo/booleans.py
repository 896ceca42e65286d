"""Parser of boolean parameters in config.pbtxt, shared by checks and models.

Each Python model gets a copy of this file, which therefore imports nothing of this project. Words
that this parser refuses are no errors upstream: the models and the backend there silently read such
words as false or as the default.
"""

TRUE, FALSE = ("true", "1"), ("false", "0")
"""Words that `tensorrt_llm` accepts, in any case. In C++ every other word is false."""
MODEL_TRUE, MODEL_FALSE = (*TRUE, "t", "yes", "y"), (*FALSE, "f", "no", "n")
"""Words that preprocessing, postprocessing and tensorrt_llm_bls accept, in any case."""


def parse_boolean(value: str, *, of_text_model: bool = False) -> bool:
    """Return the value of a boolean parameter.

    Set `of_text_model` for a parameter of preprocessing, postprocessing or tensorrt_llm_bls. The
    default is for a parameter of the core model. Raises ValueError for a word that the model does
    not accept.
    """
    true, false = (MODEL_TRUE, MODEL_FALSE) if of_text_model else (TRUE, FALSE)
    word = value.lower()
    if word in true:
        return True
    if word in false:
        return False
    raise ValueError(f"found {value!r}; allowed: true or false")
