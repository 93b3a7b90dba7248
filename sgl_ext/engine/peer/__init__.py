"""The ``peer`` power in SGLang: engines lend each other KV memory (SwiftCache)."""
