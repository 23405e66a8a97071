"""The log of what crossed a worker's boundaries, from which a lost stage is replayed (SWIFT, PPoPP'23). No torch."""
