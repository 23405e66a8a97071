"""Jobs that are started to be measured, and computations on what they leave behind."""
