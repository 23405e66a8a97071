"""The vocabulary and the rules that every other layer shares; of others' code only msgpack, for messages (encoding)."""
