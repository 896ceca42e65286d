"""Where converted adapters are kept: memory, disk and Redis, behind `adapters.registry.Store`.

`TieredStore` (in `lora_store.tiered`) is what the gateway uses; the other files are its parts.
"""
