"""What a job's coordinator knows: the facts of one subject in each module, with the rules on these alone.

None of them decides for another.  All that follows from a change is in the modules above (core/coordinator/state.py).
"""
