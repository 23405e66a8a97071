"""megatron-core: ``layers`` registers the converters of its layers.  Importing this package alone imports nothing."""
