"""The vocabulary and the rules that every other layer shares, in four parts. ``vocabulary`` has the types and
computations that all parts use, ``messages`` the messages between the other two. ``coordinator`` and ``worker`` are the
two halves of the protocol: neither imports the other. The only third-party package is msgpack, for messages.
"""
