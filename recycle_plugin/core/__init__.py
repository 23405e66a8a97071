"""The vocabulary and the rules that every other layer shares, in four parts.

``vocabulary`` is what all parts speak and compute alike, ``messages`` what the other two say to each other.
``coordinator`` and ``worker`` are the two halves of the protocol: neither imports the other.  Of others' code only
msgpack is used, for messages.
"""
