"""A model that passes its input through torch's DLPack, as upstream's BLS does since v0.16."""

import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack, to_dlpack


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tensor = from_dlpack(pb_utils.get_input_tensor_by_name(request, "X").to_dlpack())
        moved = pb_utils.Tensor.from_dlpack("Y", to_dlpack(tensor))
        return pb_utils.InferenceResponse([moved])
