"""What every worker and the coordinator mean by the same word, and what follows from it alike for all: shapes,
instructions, plans, what has to run again.
"""
