"""megatron-core: ``layers`` registers converters for its layers. Importing this package alone imports nothing."""
