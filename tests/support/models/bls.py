"""A BLS model that ignores its callers' disconnects like upstream's.

Up to v0.17 it calls `tensorrt_llm` without an id, since v0.19 with a random one; the parameter
`inner_ids` selects the behaviour. No release checks whether its own caller is still connected.
"""

import json
import uuid

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
BEFORE = {"text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN", "end_id": "END_ID"}
BETWEEN = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
}
PASSED_THROUGH = {
    "top_k": "runtime_top_k",
    "stream": "streaming",
    "exclude_input_in_output": "exclude_input_in_output",
}


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._draws_ids = parameters["inner_ids"]["string_value"] == "drawn"

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            [before] = ask("preprocessing", rename_arrays(inputs, BEFORE), list(BETWEEN))
            core = rename_arrays(before, BETWEEN) | rename_arrays(inputs, PASSED_THROUGH)
            inner_id = str(uuid.uuid4()) if self._draws_ids else ""
            for tokens in ask("tensorrt_llm", core, ["output_ids", "sequence_length"], inner_id):
                after = {
                    "TOKENS_BATCH": tokens["output_ids"],
                    "SEQUENCE_LENGTH": tokens["sequence_length"],
                }
                [text] = ask("postprocessing", after, ["OUTPUT"])
                tensor = pb_utils.Tensor("text_output", text["OUTPUT"])
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=FINAL)


def rename_arrays(arrays, names):
    return {names[name]: array for name, array in arrays.items() if name in names}


def ask(model, inputs, outputs, request_id=""):
    """Yield the outputs of each response that has any."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=outputs,
        request_id=request_id,
    )
    decoupled = model == "tensorrt_llm"
    for response in request.exec(decoupled=True) if decoupled else [request.exec()]:
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if tensors:
            yield tensors
