"""Storage of converted adapters: memory, disk and Redis, behind `adapters.registry.Store`.

`TieredStore` (in `lora_store.tiered`) is what the gateway uses; the other modules are its parts.
"""
