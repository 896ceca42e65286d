"""Storage of LoRA adapters in memory, on disk and in Redis.

The adapters are stored in the tensor format of TensorRT-LLM. A "version" is one immutable set of an
adapter's weights, identified by its digest. A "record" lists the versions of one adapter name.

`lora_store.tiered.TieredStore` implements the interface `adapters.registry.Store` for the gateway.
The other modules are components of this class.
"""
