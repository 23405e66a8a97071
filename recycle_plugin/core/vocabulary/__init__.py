"""The words that every worker and the coordinator share, and the rules that follow from them alike for all: shapes,
instructions, plans, what has to run again after a failure.
"""
