"""Storage of converted adapters: memory, disk and Redis, behind `adapters.registry.Store`.

The gateway uses `lora_store.tiered.TieredStore`; the other modules are parts of that store.
"""
