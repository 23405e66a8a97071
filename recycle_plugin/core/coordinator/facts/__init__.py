"""The facts that a job's coordinator keeps: one subject per module, with the rules on that subject alone. No module
here decides for another. The modules above draw the consequences of a change (core/coordinator/state.py).
"""
