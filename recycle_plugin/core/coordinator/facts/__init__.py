"""What a job's coordinator knows: one subject per module, with the rules on that subject alone. No module here decides
for another. What follows from a change is in the modules above (core/coordinator/state.py).
"""
