"""megatron-core: a GPT as DeepSpeed layer specs, its text, and the converters of its layers.

``layers`` registers the converters, ``gpt`` imports it; importing this package alone imports nothing.
"""
