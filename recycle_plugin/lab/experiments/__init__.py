"""Jobs that are started to be measured, and what is computed from what they left behind."""
