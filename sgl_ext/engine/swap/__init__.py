"""The ``swap`` power in SGLang: preempted requests keep their KV (FastSwitch)."""
