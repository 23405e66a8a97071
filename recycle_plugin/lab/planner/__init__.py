"""Analytic profiles of named models, for the planner."""
