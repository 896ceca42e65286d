"""Parser of boolean parameters in config.pbtxt, for the Python models and for checks of settings.

The renderer copies this file into each model's version folder, so the file must not import other
modules of this project. The parser refuses unknown words. The Python models and the C++ backend of
upstream (tensorrtllm_backend) silently read an unknown word as false or as the default.
"""

TRUE, FALSE = ("true", "1"), ("false", "0")
"""Words that the model `tensorrt_llm` accepts, in upper or lower case.

Upstream's C++ backend reads every other word as false.
"""
MODEL_TRUE, MODEL_FALSE = (*TRUE, "t", "yes", "y"), (*FALSE, "f", "no", "n")
"""Words that preprocessing, postprocessing and tensorrt_llm_bls accept, in upper or lower case."""


def parse_boolean(value: str, *, of_text_model: bool = False) -> bool:
    """Return the value of a boolean parameter.

    Set `of_text_model` for a parameter of preprocessing, postprocessing or tensorrt_llm_bls. Leave
    it False for a parameter of `tensorrt_llm`. Raises ValueError for a word that the model does not
    accept.
    """
    true, false = (MODEL_TRUE, MODEL_FALSE) if of_text_model else (TRUE, FALSE)
    word = value.lower()
    if word in true:
        return True
    if word in false:
        return False
    raise ValueError(f"found {value!r}; allowed: true or false")
